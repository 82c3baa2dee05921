"""Projections of 9 to a few hundred rows: weight tiles through the warpgroup products, K cut among programs.

A skinny product (many weights, few rows) is bound by reading the weight, which needs every multiprocessor busy with
many loads in flight. Tiles tall enough for few re-reads of x are too few to fill the card, so K is cut into splits;
the last program of a tile to arrive adds the sums of all and finishes it (see split_sums). Before the wait for the
previous kernel a program asks L2 for the first columns of its weight tile (see linear_kernels, Note [weights before
wait]). Few rows may be normalised by each program that multiplies them, which saves a kernel.

Shape legend: B rows of x, K input width, N output width, S splits.
"""

# pyright: reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.ask_l2 import ask_l2
from graphrunner.kernels.triton.linear_call import LinearCall
from graphrunner.kernels.triton.linear_config import LinearConfig, LinearMode
from graphrunner.kernels.triton.linear_kernels import MODE_GATED, mma_epilogue, weighted
from graphrunner.kernels.triton.sample import ArgmaxPartials
from graphrunner.kernels.triton.split_sums import is_last_to_arrive, split_buffers, store_part, sum_parts


@triton.jit
def _row_squares(x):
    """Sums of the squares of rows, in float32."""
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit(do_not_specialize=["ROWS"])
def skinny_linear_kernel(
    x, x_tail, weight, weight_ptr, norm_weight_ptr, bias_ptr, residual_ptr, out_ptr, value_ptr, index_ptr, partial_ptr,
    arrived_ptr, N, eps, ROWS, K: tl.constexpr, BLOCK_B: tl.constexpr, TAIL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, MODE: tl.constexpr, IS_GELU: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, AHEAD: tl.constexpr, IS_DESCRIBED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (block of rows, tile of N, split of K): programs side by side share the weight tile.

    x, x_tail and weight are pointers, or tensor descriptors where IS_DESCRIBED; weight_ptr is a pointer always. TAIL
    more rows of x, where there are any, are multiplied with the same weight tile: 160 rows are 128 and 32. With
    HAS_NORM each program normalises the rows that it multiplies, and SPLITS is 1: it sees all of K.
    """
    tl.static_assert(SPLITS == 1 or not HAS_NORM)
    first_row = tl.program_id(0) * (BLOCK_B + TAIL)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    SLICE: tl.constexpr = K // SPLITS
    IS_GATED: tl.constexpr = MODE == MODE_GATED
    TAIL_B: tl.constexpr = max(TAIL, 16)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    b = first_row + tl.arange(0, BLOCK_B)
    b_tail = first_row + BLOCK_B + tl.arange(0, TAIL_B)
    weight_row = tl.minimum(n, N - 1).to(tl.int64)
    up_ptr = weight_ptr + N.to(tl.int64) * K
    if AHEAD != "0":
        ask_l2(weight_ptr + weight_row * K + split * SLICE, AHEAD)
        if IS_GATED:
            ask_l2(up_ptr + weight_row * K + split * SLICE, AHEAD)
    if not IS_DESCRIBED:
        k = split * SLICE + tl.arange(0, BLOCK_K)
        weight_offsets = weight_row[:, None] * K + k[None, :]
        x_offsets = b[:, None] * K + k[None, :]
        tail_offsets = b_tail[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    tail_acc = tl.zeros([BLOCK_N, TAIL_B], tl.float32)
    tail_up_acc = tl.zeros([BLOCK_N, TAIL_B], tl.float32)
    squares = tl.zeros([BLOCK_B], tl.float32)
    tail_squares = tl.zeros([TAIL_B], tl.float32)
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
            x_tile = tl.load(x + x_offsets + i * BLOCK_K, mask=(b < ROWS)[:, None], other=0.0)
        if HAS_NORM:
            g = tl.load(norm_weight_ptr + i * BLOCK_K + tl.arange(0, BLOCK_K))
            squares += _row_squares(x_tile)
            x_tile = weighted(x_tile, g[None, :], x_tile.dtype)
        acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")
        if TAIL > 0:
            if IS_DESCRIBED:
                x_last = x_tail.load([first_row + BLOCK_B, column])
            else:
                x_last = tl.load(x_tail + tail_offsets + i * BLOCK_K, mask=(b_tail < ROWS)[:, None], other=0.0)
            if HAS_NORM:
                tail_squares += _row_squares(x_last)
                x_last = weighted(x_last, g[None, :], x_last.dtype)
            tail_acc = tl.dot(w_tile, tl.trans(x_last), tail_acc, input_precision="ieee")
        if IS_GATED:
            if IS_DESCRIBED:
                up_tile = weight.load([N + tile * BLOCK_N, column])
            else:
                up_tile = tl.load(up_ptr + weight_offsets + i * BLOCK_K)
            up_acc = tl.dot(up_tile, tl.trans(x_tile), up_acc, input_precision="ieee")
            if TAIL > 0:
                tail_up_acc = tl.dot(up_tile, tl.trans(x_last), tail_up_acc, input_precision="ieee")
    is_last = True
    if SPLITS > 1:
        HALVES: tl.constexpr = 2 if IS_GATED else 1
        MAIN: tl.constexpr = BLOCK_N * BLOCK_B
        SIZE: tl.constexpr = MAIN + BLOCK_N * TAIL
        cell = tile * tl.num_programs(0) + tl.program_id(0)
        cell_ptr = partial_ptr + cell.to(tl.int64) * (SPLITS * HALVES * SIZE)
        own_ptr = cell_ptr + split * (HALVES * SIZE)
        store_part(own_ptr, acc, BLOCK_N, BLOCK_B)
        if TAIL > 0:
            store_part(own_ptr + MAIN, tail_acc, BLOCK_N, TAIL_B)
        if IS_GATED:
            store_part(own_ptr + SIZE, up_acc, BLOCK_N, BLOCK_B)
            if TAIL > 0:
                store_part(own_ptr + SIZE + MAIN, tail_up_acc, BLOCK_N, TAIL_B)
        is_last = is_last_to_arrive(arrived_ptr + cell, SPLITS)
        if is_last:
            acc = sum_parts(cell_ptr, HALVES * SIZE, SPLITS, BLOCK_N, BLOCK_B)
            if TAIL > 0:
                tail_acc = sum_parts(cell_ptr + MAIN, HALVES * SIZE, SPLITS, BLOCK_N, TAIL_B)
            if IS_GATED:
                up_acc = sum_parts(cell_ptr + SIZE, HALVES * SIZE, SPLITS, BLOCK_N, BLOCK_B)
                if TAIL > 0:
                    tail_up_acc = sum_parts(cell_ptr + SIZE + MAIN, HALVES * SIZE, SPLITS, BLOCK_N, TAIL_B)
            tl.store(arrived_ptr + cell, 0)  # ready for the next product
    if is_last:
        mma_epilogue(
            acc, up_acc, squares, n, b, tile, tl.num_programs(1), bias_ptr, residual_ptr, out_ptr, value_ptr,
            index_ptr, N, eps, ROWS, K, MODE, IS_GELU, HAS_NORM, HAS_BIAS,
        )  # fmt: skip
        if TAIL > 0:
            mma_epilogue(
                tail_acc, tail_up_acc, tail_squares, n, b_tail, tile, tl.num_programs(1), bias_ptr, residual_ptr,
                out_ptr, value_ptr, index_ptr, N, eps, ROWS, K, MODE, IS_GELU, HAS_NORM, HAS_BIAS,
            )  # fmt: skip


def prepare_skinny(
    call: LinearCall, config: LinearConfig, device: torch.device, partials: ArgmaxPartials | None
) -> runtime.Launch:
    """The launch of the kernel; `call.x` is normalised already unless config.fuses_norm. Args: decode_linear's."""
    assert call.x.is_contiguous() and call.weight.is_contiguous() and call.out.is_contiguous()
    num_rows, shape = call.x.shape[0], call.shape
    block_b, tail = row_block(config, num_rows), row_tail(config, num_rows)
    grid = skinny_grid(config, shape.num_outputs, num_rows)
    tile_size = config.block_n * (block_b + tail) * (2 if call.mode is LinearMode.GATED else 1)
    is_described = config.is_described and runtime.has_tensor_descriptors(device)
    x = x_tail = call.x
    weight = call.weight
    if is_described:
        x = TensorDescriptor.from_tensor(call.x, [block_b, config.block_k])
        x_tail = TensorDescriptor.from_tensor(call.x, [tail, config.block_k]) if tail else x
        weight = TensorDescriptor.from_tensor(call.weight, [config.block_n, config.block_k])
    unread, has_norm = call.out, config.fuses_norm and call.norm_weight is not None
    operands = (
        x,
        x_tail,
        weight,
        call.weight,
        call.norm_weight if has_norm else unread,
        call.bias if call.bias is not None else unread,
        call.residual if call.residual is not None else unread,
        call.out,
        partials.values if partials is not None else unread,
        partials.indices if partials is not None else unread,
        *split_buffers(config.slices, tile_size, grid[0] * grid[1], call.x),
        shape.num_outputs,
        call.eps,
        num_rows,
    )
    pdl = runtime.use_dependent_launch(device)
    settings = {
        "K": shape.num_inputs,
        "BLOCK_B": block_b,
        "TAIL": tail,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SPLITS": config.slices,
        "STAGES": config.num_stages,
        "MODE": int(call.mode),
        "IS_GELU": call.is_gelu,
        "HAS_NORM": has_norm,
        "HAS_BIAS": call.bias is not None,
        "AHEAD": _ask_ahead_bytes(config, shape.num_inputs // config.slices * call.weight.element_size(), device),
        "IS_DESCRIBED": is_described,
        "PDL": pdl,
        "num_warps": config.num_warps,
        "launch_pdl": pdl,
    }
    return runtime.Launch(skinny_linear_kernel, grid, operands, settings)


def row_block(config: LinearConfig, num_rows: int) -> int:
    """Rows of x a program multiplies, without its tail."""
    if config.has_fixed_rows:
        return config.block_b
    return min(config.block_b, max(16, runtime.next_power_of_2(num_rows)))


def row_tail(config: LinearConfig, num_rows: int) -> int:
    """Rows past its block that a program multiplies, too, where that is all of them; else 0."""
    rest = num_rows - config.block_b
    if not config.has_tail or rest <= 0 or rest > config.block_b:
        return 0
    return max(16, runtime.next_power_of_2(rest))


def skinny_grid(config: LinearConfig, num_outputs: int, num_rows: int) -> tuple[int, int, int]:
    """Programs: blocks of rows, tiles of N, splits of K."""
    rows_each = row_block(config, num_rows) + row_tail(config, num_rows)
    return runtime.cdiv(num_rows, rows_each), runtime.cdiv(num_outputs, config.block_n), config.slices


def _ask_ahead_bytes(config: LinearConfig, slice_bytes: int, device: torch.device) -> str:
    """Bytes of each weight row to ask L2 for before the wait, as the kernel takes them; "0" is none."""
    if not runtime.use_dependent_launch(device):
        return "0"
    return str(min(config.ahead_bytes, slice_bytes) // 16 * 16)
