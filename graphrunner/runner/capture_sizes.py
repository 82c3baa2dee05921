"""Which sizes are captured, and which one a batch is padded to. Pure functions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.scheduled_batch import ScheduledBatch

MAX_DECODE_SIZE = 512
MAX_DENSE_PREFILL_SIZE = 2048
MAX_PADDING_FACTOR = 2
MAX_LARGE_PADDING_FACTOR = 1.125  # above MAX_DENSE_PREFILL_SIZE, where compute is all of a step's time


def default_decode_sizes(max_num_seqs: int, largest_allowed: int = MAX_DECODE_SIZE) -> tuple[int, ...]:
    """1, 2, 4, 8, 12, then by 8 to 128, by 16 to 256, by 32 to 512; the limit itself is always among them."""
    top = min(max_num_seqs, largest_allowed)
    sizes = {1, 2, 4, 8, 12, *range(16, 129, 8), *range(144, 257, 16), *range(288, MAX_DECODE_SIZE + 1, 32), top}
    return tuple(sorted(size for size in sizes if size <= top))


def default_prefill_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """Token counts; the budget itself is always among them. Up to 128 a step is as long as its weights take to read,
    so those are few.

    Between MAX_DENSE_PREFILL_SIZE and the budget there are none: a full step, the common one while prompts wait, is
    exactly the budget, and in the others the device is busy for longer than the host needs to launch its kernels.
    """
    top = min(max_num_tokens, MAX_DENSE_PREFILL_SIZE)
    sizes = {4, 8, 16, 24, 32, 48, 64, 96, *range(128, 513, 32), *range(576, 1025, 64), max_num_tokens}
    sizes |= set(range(1280, top + 1, 256))
    return tuple(sorted(size for size in sizes if size <= max_num_tokens))


def sparse_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The powers of two of a rising list, and its largest: for backends that compile each size, for seconds."""
    return tuple(size for size in sizes if size & (size - 1) == 0 or size == sizes[-1])


def user_sizes(sizes: Sequence[int], limit: int) -> tuple[int, ...]:
    """A user's list as given, sorted, without sizes above what can ever run."""
    kept = sorted({size for size in sizes if size <= limit})
    return tuple(kept) or (limit,)


def prefill_miss_reason(batch: ScheduledBatch, sizes: Sequence[int], max_reqs: int) -> GraphMiss | None:
    """Why no token bucket takes a prefill or mixed step; None when one does."""
    if batch.num_reqs > max_reqs:
        return GraphMiss(GraphMissReason.NUM_REQS, batch.num_reqs, max_reqs)
    size = bucket_for(batch.num_tokens, sizes)
    if size is None:
        return GraphMiss(GraphMissReason.NUM_TOKENS, batch.num_tokens, sizes[-1])
    factor = MAX_PADDING_FACTOR if size <= MAX_DENSE_PREFILL_SIZE else MAX_LARGE_PADDING_FACTOR
    if size > factor * batch.num_tokens:
        return GraphMiss(GraphMissReason.PADDING, size, int(factor * batch.num_tokens))
    return None


def bucket_for(count: int, sizes: Sequence[int]) -> int | None:
    """The smallest size that holds `count`; None when none does."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None
