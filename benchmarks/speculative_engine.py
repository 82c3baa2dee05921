"""What both parts of `benchmarks/speculative.py` share: an engine that gives its memory back, and sums over results."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


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
