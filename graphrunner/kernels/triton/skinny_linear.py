"""Projections of 9 to a few hundred rows: weight tiles through the warpgroup products, K cut among programs.

A skinny product (many weights, few rows) is bound by reading the weight, which needs every multiprocessor busy with
many loads in flight. Tiles tall enough for few re-reads of x are too few to fill the card, so K is cut into splits;
the last program of a tile to arrive adds the others' partial sums in the order of the splits, whatever the order of
arrival, and finishes the tile. Before the wait for the previous kernel a program asks L2 for the first columns of its
weight tile (see linear_kernels, Note [weights before wait]).

Shape legend: B rows of x, K input width, N output width, S splits.
Source: split-K with a semaphore, as in CUTLASS's serial split-K reduction.
"""

# pyright: reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.ask_l2 import ask_l2
from graphrunner.kernels.triton.linear_config import LinearConfig
from graphrunner.kernels.triton.linear_kernels import MODE_GATED, mma_epilogue


@triton.jit(do_not_specialize=["ROWS"])
def skinny_linear_kernel(
    x, weight, bias_ptr, residual_ptr, out_ptr, value_ptr, index_ptr, partial_ptr, arrived_ptr, N, ROWS,
    K: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, MODE: tl.constexpr, IS_GELU: tl.constexpr, HAS_BIAS: tl.constexpr, AHEAD: tl.constexpr,
    IS_DESCRIBED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (block of rows, tile of N, split of K): programs side by side share the weight tile.

    x and weight are pointers, or tensor descriptors where IS_DESCRIBED.
    """
    first_row = tl.program_id(0) * BLOCK_B
    tile = tl.program_id(1)
    split = tl.program_id(2)
    SLICE: tl.constexpr = K // SPLITS
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    b = first_row + tl.arange(0, BLOCK_B)
    if not IS_DESCRIBED:
        k = split * SLICE + tl.arange(0, BLOCK_K)
        weight_row = tl.minimum(n, N - 1).to(tl.int64)
        up_ptr = weight + N.to(tl.int64) * K
        if AHEAD != "0":
            ask_l2(weight + weight_row * K + split * SLICE, AHEAD)
            if MODE == MODE_GATED:
                ask_l2(up_ptr + weight_row * K + split * SLICE, AHEAD)
        weight_offsets = weight_row[:, None] * K + k[None, :]
        x_offsets = b[:, None] * K + k[None, :]
        is_row = (b < ROWS)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for i in tl.range(0, SLICE // BLOCK_K, num_stages=STAGES):
        if IS_DESCRIBED:
            column = split * SLICE + i * BLOCK_K
            w_tile = weight.load([tile * BLOCK_N, column])
            x_tile = x.load([first_row, column])
        else:
            w_tile = tl.load(weight + weight_offsets + i * BLOCK_K)
            x_tile = tl.load(x + x_offsets + i * BLOCK_K, mask=is_row, other=0.0)
        acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")
        if MODE == MODE_GATED:
            if IS_DESCRIBED:
                up_tile = weight.load([N + tile * BLOCK_N, column])
            else:
                up_tile = tl.load(up_ptr + weight_offsets + i * BLOCK_K)
            up_acc = tl.dot(up_tile, tl.trans(x_tile), up_acc, input_precision="ieee")
    is_last = True
    if SPLITS > 1:
        HALVES: tl.constexpr = 2 if MODE == MODE_GATED else 1
        SIZE: tl.constexpr = BLOCK_N * BLOCK_B
        cell = tile * tl.num_programs(0) + tl.program_id(0)
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_B + tl.arange(0, BLOCK_B)[None, :]
        base_ptr = partial_ptr + cell.to(tl.int64) * (SPLITS * HALVES * SIZE) + place
        tl.store(base_ptr + split * HALVES * SIZE, acc)
        if MODE == MODE_GATED:
            tl.store(base_ptr + (split * HALVES + 1) * SIZE, up_acc)
        tl.debug_barrier()  # every thread's partial sums are written before this program says so
        is_last = tl.atomic_add(arrived_ptr + cell, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            acc = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
            up_acc = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
            for s in tl.range(SPLITS):
                acc += tl.load(base_ptr + s * HALVES * SIZE, cache_modifier=".cg")
                if MODE == MODE_GATED:
                    up_acc += tl.load(base_ptr + (s * HALVES + 1) * SIZE, cache_modifier=".cg")
            tl.store(arrived_ptr + cell, 0)  # ready for the next product
    if is_last:
        mma_epilogue(
            acc, up_acc, 1.0, n, b, tile, tl.num_programs(1), bias_ptr, residual_ptr, out_ptr, value_ptr,
            index_ptr, N, 0.0, ROWS, K, MODE, IS_GELU, False, HAS_BIAS,
        )  # fmt: skip


def row_block(config: LinearConfig, num_rows: int) -> int:
    """Rows of x a program multiplies."""
    if config.has_fixed_rows:
        return config.block_b
    return min(config.block_b, max(16, runtime.next_power_of_2(num_rows)))


def skinny_grid(config: LinearConfig, num_outputs: int, num_rows: int) -> tuple[int, int, int]:
    """Programs: blocks of rows, tiles of N, splits of K."""
    block_b = row_block(config, num_rows)
    return runtime.cdiv(num_rows, block_b), runtime.cdiv(num_outputs, config.block_n), config.slices


def split_buffers(config: LinearConfig, halves: int, grid: tuple[int, int, int], num_rows: int, like: Tensor):
    """Partial sums and arrival counters of one product; `like` twice when K is not cut.

    Args:
        halves: 2 for a gated product.
        grid: see skinny_grid.
        like: any tensor on the device the product runs on.
    """
    row_blocks, tiles, splits = grid
    if splits == 1:
        return like, like
    size = tiles * row_blocks * splits * halves * config.block_n * row_block(config, num_rows)
    partial = torch.empty(size, dtype=torch.float32, device=like.device)
    return partial, runtime.arrival_counters(like.device, tiles * row_blocks)


def ask_ahead_bytes(config: LinearConfig, slice_bytes: int, device: torch.device) -> str:
    """Bytes of each weight row to ask L2 for before the wait, as the kernel takes them; "0" is none."""
    if not runtime.use_dependent_launch(device):
        return "0"
    return str(min(config.ahead_bytes, slice_bytes) // 16 * 16)
