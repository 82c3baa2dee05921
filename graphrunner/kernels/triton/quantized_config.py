"""Which kernel, with which tiles, a projection by packed weights runs."""

from dataclasses import dataclass
from enum import StrEnum

import torch

from graphrunner.kernels.packed_weight import Weight, WeightLayout
from graphrunner.kernels.triton import runtime

MAX_VECTOR_ROWS = 4
MAX_SLICED_ROWS = 16
MAX_TILED_ROWS = 256
_MAX_TURNS = 16
_MAX_VECTOR_COLS = 2048
_VECTOR_WEIGHTS = 8 << 10  # a program holds: 64 a thread of four warps
_WANTED_PROGRAMS = 264  # two for each multiprocessor of the largest cards
_MIN_TURNS = 6  # of a piece of K: fewer leave the pipeline of loads half filled
_MAX_SPLITS = 8
_MIN_DOT = 16  # a tensor-core product's smallest side


class PackedKind(StrEnum):
    """Which implementation multiplies."""

    VECTOR = "vector"  # CUDA cores
    SLICED = "sliced"  # tensor cores, slices of K side by side
    TILE = "tile"  # tensor cores, 2-D tiles
    WIDEN = "widen"  # widened into memory, slab by slab, for the library's product


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """One launch configuration.

    Attributes:
        kind: implementation.
        block_n: weight rows a program (pairs when VECTOR or SLICED multiply gate and up).
        block_k: inputs a turn (VECTOR), or bytes of a weight row a load (SLICED, TILE).
        block_b: rows of x a program (TILE).
        slices: slices of K side by side (SLICED), or pieces of K in programs of their own (TILE).
        num_warps, num_stages: as Triton means them.
    """

    kind: PackedKind
    block_n: int = 1
    block_k: int = 128
    block_b: int = 16
    slices: int = 1
    num_warps: int = 4
    num_stages: int = 4


WIDEN_CONFIG = PackedConfig(PackedKind.WIDEN)


def row_bytes(weight: Weight) -> int:
    """Bytes of one packed weight row."""
    return weight.data.shape[1]


def group_bytes(weight: Weight) -> int:
    """Bytes of a row that share a scale."""
    if weight.group_size == 0:
        return row_bytes(weight)
    return weight.group_size // 2 if weight.layout is WeightLayout.INT4 else weight.group_size


def is_valid(config: PackedConfig, weight: Weight, num_rows: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can run this configuration on this weight at all."""
    width = weight.shape[1]
    if config.kind is PackedKind.WIDEN:
        return True
    if weight.group_size & (weight.group_size - 1):
        return False  # a tile has a power of two of everything
    if config.kind is PackedKind.VECTOR:
        has_whole_groups = weight.layout is not WeightLayout.INT4 or config.block_k % weight.group_size == 0
        is_whole = width % config.block_k == 0 and width // config.block_k <= _MAX_TURNS
        return num_rows <= MAX_VECTOR_ROWS and is_whole and has_whole_groups
    most_rows = MAX_SLICED_ROWS if config.kind is PackedKind.SLICED else MAX_TILED_ROWS
    return (
        dtype.itemsize == 2
        and num_rows <= most_rows
        and config.block_k >= _MIN_DOT
        and (weight.group_size == 0 or group_bytes(weight) % config.block_k == 0)
        and row_bytes(weight) % (config.slices * config.block_k) == 0
    )


def select_packed_config(weight: Weight, num_rows: int, dtype: torch.dtype, is_gated: bool) -> PackedConfig:
    """A configuration from shapes alone.

    Args:
        weight: packed.
        num_rows: of x.
        dtype: of x.
        is_gated: whether gate and up rows are multiplied side by side.
    """
    candidates = (
        _vector_config(weight, is_gated),
        _sliced_config(weight, is_gated),
        _tile_config(weight, num_rows),
    )
    is_vector_fast = num_rows == 1 or dtype.itemsize == 4
    for config in candidates if is_vector_fast else candidates[1:]:
        if is_valid(config, weight, num_rows, dtype):
            return config
    return WIDEN_CONFIG


def _vector_config(weight: Weight, is_gated: bool) -> PackedConfig:
    """Whole rows, about `_VECTOR_WEIGHTS` numbers a program."""
    width = weight.shape[1]
    block_k = min(runtime.largest_power_of_two_divisor(width), _MAX_VECTOR_COLS)
    one_row = width * (2 if is_gated else 1)
    block_n = 1
    while block_n < 16 and 2 * block_n * one_row <= _VECTOR_WEIGHTS:
        block_n *= 2
    return PackedConfig(PackedKind.VECTOR, block_n, block_k, num_warps=8 if block_n * one_row > _VECTOR_WEIGHTS else 4)


def _sliced_config(weight: Weight, is_gated: bool) -> PackedConfig:
    """Four slices where the width allows, tiles of 16 weight rows."""
    width = row_bytes(weight)
    divisor = runtime.largest_power_of_two_divisor(width)
    slices = 4 if divisor >= 4 * 32 else 1
    block_k = min(divisor // slices, group_bytes(weight), 64 if is_gated else 128)
    return PackedConfig(PackedKind.SLICED, 16, block_k, slices=slices)


def _tile_config(weight: Weight, num_rows: int) -> PackedConfig:
    """Tall tiles, so that x is read seldom; K in pieces until every multiprocessor has a long enough walk."""
    block_k = min(runtime.largest_power_of_two_divisor(row_bytes(weight)), group_bytes(weight), 128)
    block_b = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    block_n = 128 if weight.shape[0] >= 128 else 32
    num_tiles = -(-weight.shape[0] // block_n) * -(-num_rows // block_b)
    num_turns = row_bytes(weight) // block_k
    most = min(_WANTED_PROGRAMS // num_tiles, num_turns // _MIN_TURNS, _MAX_SPLITS)
    splits = next((count for count in range(most, 1, -1) if num_turns % count == 0), 1)
    return PackedConfig(PackedKind.TILE, block_n, block_k, block_b, splits, 8 if block_n == 128 else 4)
