"""Sums of a product whose K is cut among programs: each leaves its part, and the last of a tile to arrive adds them.

The parts are added in the order of the splits, whatever the order of arrival.
Source: split-K with a semaphore, as in CUTLASS's serial split-K reduction.
"""

# pyright: reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphrunner.kernels.triton import runtime


@triton.jit
def store_part(part_ptr, acc, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """Leave a tile's sums of one split."""
    place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_B + tl.arange(0, BLOCK_B)[None, :]
    tl.store(part_ptr + place, acc)


@triton.jit
def sum_parts(part_ptr, step, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """The parts, `step` elements apart, added in the order of the splits."""
    place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_B + tl.arange(0, BLOCK_B)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    for s in tl.range(SPLITS):
        total += tl.load(part_ptr + s * step + place, cache_modifier=".cg")
    return total


@triton.jit
def is_last_to_arrive(cell_ptr, num_programs):
    """Say that this program's parts are written; whether all the others have said so before."""
    tl.debug_barrier()  # every thread's part is written before this program says so
    return tl.atomic_add(cell_ptr, 1, sem="acq_rel") == num_programs - 1


def split_buffers(num_splits: int, tile_size: int, num_tiles: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Parts, float32 [num_tiles * num_splits * tile_size], and arrival counters; `like` twice when K is not cut.

    Args:
        num_splits: of K.
        tile_size: numbers in a part.
        num_tiles: of the product.
        like: any tensor on the device the product runs on.
    """
    if num_splits == 1:
        return like, like
    parts = torch.empty(num_tiles * num_splits * tile_size, dtype=torch.float32, device=like.device)
    return parts, runtime.arrival_counters(like.device, num_tiles)
