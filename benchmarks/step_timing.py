"""Timing recorded steps against each other on a card at work, whose clock falls as it draws more power.

A short burst of replays runs at the highest clock, where a kernel that wastes arithmetic looks as good as one that does
not; a second or two of large steps do not. So the card is kept busy before a comparison, and both sides take turns.
"""

import torch

from benchmarks.kernel_steps import Model
from benchmarks.kernel_tuning import DEVICE
from benchmarks.step_candidates import Step

HEAT_S, HEAT_REPLAYS = 0.15, 96
"""The card is busy for both: the larger the step, the more power it draws and the longer until its clock settles."""
TURNS_PER_HEAT, NUM_TURNS = 4, 3


def recorded(model: Model, step: Step) -> torch.cuda.CUDAGraph:
    """The step with the configurations in use now."""
    metadata = step.metadata(model)
    ids = torch.ones(step.num_rows, dtype=torch.int32, device=DEVICE)
    model.forward(ids, metadata)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.forward(ids, metadata)
    graph.inputs = (metadata, ids)  # the recording reads them
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, num_replays: int) -> float:
    """Microseconds of one replay among so many."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(num_replays):
        graph.replay()
    stop.record()
    stop.synchronize()
    return 1e3 * start.elapsed_time(stop) / num_replays


def heated_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay on a card that has been busy with it."""
    num_replays = _heating_replays(graph)
    replay_us(graph, num_replays)
    return replay_us(graph, num_replays)


def relative_time(graph: torch.cuda.CUDAGraph, other: torch.cuda.CUDAGraph) -> float:
    """Time of the one over that of the other: the median of turns on a card that has been busy with both."""
    num_replays = _heating_replays(other) // TURNS_PER_HEAT
    replay_us(graph, _heating_replays(graph))
    ratios = [replay_us(graph, num_replays) / replay_us(other, num_replays) for _ in range(NUM_TURNS)]
    return sorted(ratios)[NUM_TURNS // 2]


def _heating_replays(graph: torch.cuda.CUDAGraph) -> int:
    return max(HEAT_REPLAYS, int(HEAT_S * 1e6 / replay_us(graph, 2)))
