"""A decode step without its host: the bare replay of its graph, and where the replay's time goes, kernel by kernel.

    python benchmarks/replay_profile.py [--shapes 0.6B,1B,8B]

Requests are brought to the middle of the measured decode (960 + 64 tokens of context); then their step's graph is
replayed back to back, the rows put back in between. "host_share" is what the step through `LLM.generate` takes over
that, at batch 1.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from benched_engine import BenchedEngine
from ceilings import elapsed_s, synchronize
from decode_step import decode_row
from floors import decode_floor_s
from kernel_profile import profile_call
from result_rows import Row, RowSink
from workload import prompt

REPLAYS_A_ROUND = 8
NUM_ROUNDS = 25
PROFILED_BATCHES = (1, 256)
"""Where a step's time is broken down: the ends of the range."""


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """A batch in the middle of decoding.

    Attributes:
        replay: launches the step once; every launch moves the rows on by one token.
        rewind: puts the rows back.
        context_tokens: that the requests hold together in the middle of a round of replays.
    """

    replay: Callable[[], object]
    rewind: Callable[[], None]
    context_tokens: int


def replay_rows(bench: BenchedEngine, sink: RowSink) -> Iterator[Row]:
    """Bare replays of every batch size, their breakdown, and the host's share at batch 1."""
    load = bench.workload
    if 1 not in bench.step_ms:
        decode_row(bench, 1)
    for batch in load.batches:
        with steady_step(bench, batch) as step:
            bare_ms = 1e3 * bare_seconds(step, bench.device)
            floor_s = decode_floor_s(bench.config, bench.ceilings, batch, step.context_tokens, load.bytes_per_value)
            yield Row.of(f"bare/{bench.shape}/batch{batch}", bare_ms, "ms", 1e3 * floor_s)
            if batch == 1:
                yield Row.of(f"host_share/{bench.shape}", 100 * (bench.step_ms[1] / bare_ms - 1), "%")
            if batch in PROFILED_BATCHES:
                sink.profile(
                    f"decode/{bench.shape}/batch{batch}", {"step_us": 1e3 * bare_ms} | profile(step, bench.device)
                )


@contextmanager
def steady_step(bench: BenchedEngine, batch: int) -> Iterator[SteadyStep]:
    """Requests half way through their decode; they are aborted at the end."""
    from graphrunner import SamplingParams

    engine, load = bench.llm.engine, bench.workload
    ids = [f"steady-{bench.shape}-{batch}-{index}" for index in range(batch)]
    # As many tokens as there is room for: where prompts are chunked, the first requests decode beside the last prompts.
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)
    for index, request_id in enumerate(ids):
        engine.add_request(
            request_id, prompt(bench.decode_prompt_len(batch), index, bench.config["vocab_size"]), params
        )
    try:
        num_decodes = 0
        while num_decodes < load.num_steps // 2:
            assert engine.has_unfinished_requests(), "a step failed and took its requests along"
            engine.step()
            last = bench.llm.steps[-1]
            num_decodes += last.mode.value == "decode" and last.num_reqs == batch
        synchronize(bench.device)
        assert last.is_graph, f"no graph took the step: {last.miss_reason}"
        runner = engine.core.model_runner.decode_cuda_graph_runner
        table = runner.context.table
        held = {name: value for name, value in vars(table).items() if isinstance(value, torch.Tensor)}
        kept = {name: value.clone() for name, value in held.items()}

        def rewind() -> None:
            for name, value in held.items():
                value.copy_(kept[name])

        rows = runner.buffers.tensors["request_rows"][:batch].long()
        context_tokens = int(table.num_computed[rows].sum()) + batch * REPLAYS_A_ROUND // 2
        with torch.inference_mode(), runner.backend.replay_session():
            yield SteadyStep(lambda: runner.backend.replay(last.key), rewind, context_tokens)
            rewind()
    finally:
        for request_id in ids:
            engine.abort_request(request_id)
        while engine.has_unfinished_requests():
            engine.step()


def replays(step: SteadyStep) -> None:
    """A round."""
    for _ in range(REPLAYS_A_ROUND):
        step.replay()


def bare_seconds(step: SteadyStep, device: str) -> float:
    """One replay in a row of them; the best round."""
    best_s = float("inf")
    for _ in range(NUM_ROUNDS):
        step.rewind()
        synchronize(device)
        best_s = min(best_s, elapsed_s(lambda: replays(step), device) / REPLAYS_A_ROUND)
    return best_s


def profile(step: SteadyStep, device: str) -> dict:
    """The kernels of one replay."""
    step.rewind()
    return profile_call(lambda: replays(step), device, REPLAYS_A_ROUND)


if __name__ == "__main__":
    from worker import run_alone

    run_alone(__doc__, ["decode", "replay"])
