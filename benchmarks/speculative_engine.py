"""What both parts of `benchmarks/speculative.py` share: an engine that gives its memory back, and sums over results."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar
from unittest import mock

Made = TypeVar("Made")
_MOST_COLD_RUNS = 4


@contextmanager
def opened(model: str | None, **options: object) -> Iterator:
    """An `LLM`, and its memory given back after it. Pages are counted, so that two of them fit beside each other.

    Says on stderr what the start took, by phase.
    """
    import torch

    from graphrunner import LLM

    start_s = time.perf_counter()
    llm = LLM(model, **options)
    phases = ", ".join(
        f"{phase.name} {phase.seconds:.1f}" for phase in llm.startup_report().phases if phase.seconds >= 0.1
    )
    print(f"           a start: {time.perf_counter() - start_s:.1f} s ({phases})", file=sys.stderr, flush=True)
    try:
        yield llm
    finally:
        llm.close()
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextmanager
def cold_work() -> Iterator[list[str]]:
    """Collects what a first run owes and a later one does not: graphs recorded, kernels compiled or loaded."""
    import torch

    from graphrunner.runner.graph_account import GraphAccount

    met: list[str] = []
    captured = GraphAccount.captured

    def noted(account: GraphAccount, runner: str, key: object, stats: object) -> None:
        met.append(f"graph {runner} {key}")
        captured(account, runner, key, stats)  # type: ignore[arg-type]

    with mock.patch.object(GraphAccount, "captured", noted):
        if not torch.cuda.is_available():
            yield met
            return
        from triton import knobs

        def compiled(*, fn: object, **_told: object) -> bool:
            met.append(f"kernel {getattr(fn, 'name', fn)}")
            return False

        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = compiled
        try:
            yield met
        finally:
            knobs.runtime.jit_cache_hook = before


def warm_runs(run: Callable[[], Made], num_runs: int) -> list[Made]:
    """What so many runs return that record no graph and load no kernel; runs that do are done again.

    Raises:
        RuntimeError: after four of these.
    """
    made: list[Made] = []
    for _ in range(num_runs + _MOST_COLD_RUNS):
        with cold_work() as met:
            result = run()
        if not met:
            made.append(result)
        if len(made) == num_runs:
            return made
    raise RuntimeError(f"runs do not get warm, the last one met {len(met)}: {', '.join(met[:3])}")


def finished(outputs: Sequence) -> Sequence:
    """The outputs, none of which an error ended."""
    for output in outputs:
        one = output.outputs[0]
        if one.finish_reason == "error":
            raise RuntimeError(f"{output.request_id} ended with an error: {one.stop_reason}")
    return outputs


def mean_accepted(stats: Sequence) -> float:
    """Drafts that stand in a round; the token that the target adds is not counted."""
    num_rounds = sum(one.num_rounds for one in stats)
    return sum(one.num_accepted for one in stats) / num_rounds if num_rounds else 0.0


def acceptance_by_position(stats: Sequence) -> list[float]:
    """Share of rounds with a draft at a position in which it and all before it stand."""
    shares = []
    for place in range(1, 1 + max((len(one.drafted_lengths) for one in stats), default=0)):
        drafted = sum(sum(one.drafted_lengths[place:]) for one in stats)
        stands = sum(sum(one.accepted_lengths[place:]) for one in stats)
        if drafted and (stands or not shares):
            shares.append(stands / drafted)
    return shares
