"""Configurations of small-batch projections that are worth timing on a card."""

import itertools
from dataclasses import dataclass, replace

import torch

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.linear_config import (
    LIBRARY_CONFIG,
    MAX_FUSED_ROWS,
    MAX_VECTOR_ROWS,
    LinearConfig,
    LinearKind,
    LinearMode,
    LinearShape,
    is_valid,
    padded_columns,
)
from graphrunner.kernels.triton.skinny_linear import row_tail

_MIN_RING_BYTES, _MAX_RING_BYTES = 16 << 10, 208 << 10
_MAX_NORMED_ROWS = 64  # each program normalises all of them
_AHEAD_BYTES = 1024
_MAX_INPUTS_OF_ONE_ROW_MMA = 2048  # one turn of the loop


@dataclass(frozen=True, slots=True)
class LinearProblem:
    """One entry of the table to fill: a shape at a number of rows."""

    shape: LinearShape
    num_rows: int
    dtype: torch.dtype = torch.bfloat16


def candidate_configs(problem: LinearProblem, is_exhaustive: bool = False) -> list[LinearConfig]:
    """Configurations worth timing, the library first.

    Args:
        problem: what will run.
        is_exhaustive: every tile that fits the card (50 to 150 of them, minutes to compile) instead of the few that
            won somewhere.
    """
    shape, num_rows = problem.shape, problem.num_rows
    found = [LIBRARY_CONFIG]
    if num_rows <= MAX_VECTOR_ROWS:
        found += _vector_candidates(problem, is_exhaustive)
    if num_rows <= MAX_FUSED_ROWS and (num_rows > 1 or shape.num_inputs <= _MAX_INPUTS_OF_ONE_ROW_MMA):
        found += _tensor_core_candidates(problem, is_exhaustive)
    if num_rows > 4:
        found += _skinny_candidates(problem, is_exhaustive)
    if num_rows > MAX_FUSED_ROWS:
        found += _described_candidates(problem)
    if 4 < num_rows <= _MAX_NORMED_ROWS:
        found += [replace(config, fuses_norm=True) for config in found if config.kind is LinearKind.SKINNY]
    return [config for config in dict.fromkeys(found) if is_valid(config, shape, num_rows, problem.dtype)]


def _vector_candidates(problem: LinearProblem, is_exhaustive: bool) -> list[LinearConfig]:
    """Tiles of whole rows: measured best at 16 KiB a tile, 3 or 4 tiles in flight, 2 or 3 programs."""
    shape = problem.shape
    row_bytes = shape.num_inputs * problem.dtype.itemsize * (2 if shape.mode is LinearMode.GATED else 1)
    whole_row = runtime.next_power_of_2(shape.num_inputs)
    num_multiprocessors = runtime.num_multiprocessors(torch.device("cuda", 0))
    depths = itertools.product((2, 3, 4, 5), (1, 2, 3)) if is_exhaustive else ((4, 2), (3, 3), (3, 2))
    largest = 64 << 10 if is_exhaustive else 32 << 10
    found = []
    for (num_stages, programs), block_n, num_warps in itertools.product(depths, (1, 2, 4, 8, 16), (4, 8)):
        tile_bytes = block_n * row_bytes
        # Where all tiles run at once there is no ring to fill.
        is_at_once = shape.num_outputs // block_n <= programs * num_multiprocessors
        is_deep = is_at_once or tile_bytes * num_stages >= _MIN_RING_BYTES
        fits = is_deep and tile_bytes * num_stages * programs <= _MAX_RING_BYTES
        is_good = tile_bytes <= largest and (tile_bytes >= 8 << 10 or is_at_once or is_exhaustive)
        # A wide tile wants more threads, a narrow one fewer: the other pairings never won.
        is_paired = is_exhaustive or (num_warps == 8) == (tile_bytes > 16 << 10)
        if not is_exhaustive and (num_stages, programs) == (3, 2) and tile_bytes < 24 << 10:
            continue  # only for rows too long to keep more in flight
        if fits and is_good and is_paired:
            widths = (2048, 1024, 512) if is_exhaustive else (2048, 512)
            for block_k in sorted({min(whole_row, width) for width in widths}):
                found.append(LinearConfig(LinearKind.VECTOR, block_n, block_k, 1, num_warps, num_stages, programs))
    return found


def _tensor_core_candidates(problem: LinearProblem, is_exhaustive: bool) -> list[LinearConfig]:
    """Slices of K side by side in a program; few turns of the loop win, for each waits for its rows of x."""
    halves, num_inputs = 2 if problem.shape.mode is LinearMode.GATED else 1, problem.shape.num_inputs
    if is_exhaustive:
        tiles = list(itertools.product((2, 4, 8, 16), (16, 32), (64, 128, 256), (3, 4, 6)))
    else:
        tiles = [
            (4, 16, 256, 3), (4, 16, 256, 6), (8, 16, 256, 3), (8, 16, 128, 4), (4, 32, 64, 4), (4, 32, 128, 4),
            (8, 32, 64, 4), (4, 16, 128, 4), (8, 16, 64, 4), (16, 16, 64, 3), (16, 16, 128, 3),
        ]  # fmt: skip
    found = []
    for slices, block_n, block_k, most_stages in tiles:
        turns = runtime.cdiv(num_inputs, slices * block_k)
        if padded_columns(num_inputs, slices * block_k) >= 2 * num_inputs:
            continue  # half of the warps would have nothing to do
        num_stages = min(most_stages, turns + 1)
        ring = slices * block_n * halves * block_k * problem.dtype.itemsize * num_stages
        if ring <= _MAX_RING_BYTES and (ring >= 2 * _MIN_RING_BYTES or num_stages > turns):
            found.append(LinearConfig(LinearKind.MMA, block_n, block_k, slices, max(slices, 4), num_stages))
    return found


def _skinny_candidates(problem: LinearProblem, is_exhaustive: bool) -> list[LinearConfig]:
    """Tiles and splits that give each multiprocessor a program or two, with a ring that two programs share."""
    shape, num_rows = problem.shape, problem.num_rows
    halves = 2 if shape.mode is LinearMode.GATED else 1
    num_multiprocessors = runtime.num_multiprocessors(torch.device("cuda", 0))
    tiles_of_n = ((64, 4), (128, 4), (128, 8)) if is_exhaustive else ((64, 4), (128, 8 if num_rows > 32 else 4))
    found = []
    for rows, (block_n, num_warps), block_k in itertools.product(_tiles_of_rows(num_rows), tiles_of_n, (64, 128)):
        rows_each = rows.block_b + row_tail(rows, num_rows)
        if block_n * rows_each * halves > 16384 * (num_warps // 4):
            continue
        tiles = runtime.cdiv(shape.num_outputs, block_n) * runtime.cdiv(num_rows, rows_each)
        stage_bytes = (block_n * halves + rows_each) * block_k * problem.dtype.itemsize
        for slices in _good_splits(shape, tiles, block_k, num_multiprocessors, is_exhaustive):
            # Programs that fit the card once over may have all the shared memory, else two share it.
            is_alone = tiles * slices <= num_multiprocessors * 1.1
            rings = (104 << 10, 200 << 10) if is_exhaustive else (_MAX_RING_BYTES if is_alone else 104 << 10,)
            for ring_bytes in rings:
                num_stages = min(ring_bytes // stage_bytes, shape.num_inputs // (slices * block_k), 10)
                if num_stages >= 2:
                    tile = replace(rows, block_n=block_n, block_k=block_k, slices=slices, num_warps=num_warps)
                    found.append(replace(tile, num_stages=num_stages, ahead_bytes=_AHEAD_BYTES))
    return found


def _tiles_of_rows(num_rows: int) -> list[LinearConfig]:
    """Skinny configurations that differ in how the rows of x are shared out."""
    block_bs = sorted({min(size, max(16, runtime.next_power_of_2(num_rows))) for size in (64, 128, 256)})
    found = [LinearConfig(LinearKind.SKINNY, block_b=block_b) for block_b in block_bs]
    tailed = (LinearConfig(LinearKind.SKINNY, block_b=block_b, has_tail=True) for block_b in (64, 128))
    return found + [config for config in tailed if row_tail(config, num_rows)]


def _described_candidates(problem: LinearProblem) -> list[LinearConfig]:
    """Tiles through tensor descriptors: without a thread's addresses there is room for larger ones."""
    shape, num_rows, device = problem.shape, problem.num_rows, torch.device("cuda", 0)
    if not runtime.has_tensor_descriptors(device):
        return []
    halves = 2 if shape.mode is LinearMode.GATED else 1
    num_multiprocessors = runtime.num_multiprocessors(device)
    block_k = 64  # a line of 128 bytes
    found = []
    for rows, (block_n, num_warps), ring_bytes in itertools.product(
        _tiles_of_rows(num_rows), ((64, 4), (64, 8), (128, 4), (128, 8)), (104 << 10, 208 << 10)
    ):
        rows_each = rows.block_b + row_tail(rows, num_rows)
        sums_a_thread = block_n * rows_each * halves // (32 * num_warps)
        if sums_a_thread > 160 or ((block_n, num_warps) == (64, 8) and sums_a_thread <= 64):
            continue
        stage_bytes = (block_n * halves + rows_each) * block_k * problem.dtype.itemsize
        num_tiles = runtime.cdiv(shape.num_outputs, block_n) * runtime.cdiv(num_rows, rows_each)
        for slices in _good_splits(shape, num_tiles, block_k, num_multiprocessors, is_exhaustive=False):
            num_stages = min(ring_bytes // stage_bytes, shape.num_inputs // (slices * block_k), 8)
            if num_stages >= 2:
                tile = replace(rows, block_n=block_n, block_k=block_k, slices=slices, num_warps=num_warps)
                found.append(replace(tile, num_stages=num_stages, is_described=True))
    return found


def _good_splits(
    shape: LinearShape, tiles: int, block_k: int, num_multiprocessors: int, is_exhaustive: bool
) -> list[int]:
    """Splits of K that come nearest to filling the card once, and twice; more of them when exhaustive."""
    possible = [
        slices
        for slices in ((1, 2, 4, 7, 8, 14, 16) if shape.mode is not LinearMode.ARGMAX else (1,))
        if shape.num_inputs % (slices * block_k) == 0 and shape.num_inputs >= 2 * slices * block_k
    ]
    if is_exhaustive or len(possible) <= 1:
        return possible
    return sorted(
        {min(possible, key=lambda slices: abs(tiles * slices - fill * num_multiprocessors)) for fill in (0.9, 1.9)}
    )
