"""Which kernel, with which tiles, a small-batch projection runs: the measured table and the default for the rest."""

import functools
import json
import os
from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum
from pathlib import Path

import torch

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.tuned_configs import TUNED_LINEAR

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
MAX_FUSED_ROWS = 16
MAX_SKINNY_ROWS = ROW_BUCKETS[-1]
MAX_VECTOR_ROWS = 4
_MIN_BLOCK_K = 64
_COLUMNS_OF_16_BYTES = 8
_MAX_CHUNKS = 16  # of a row, which the vector kernel keeps in registers
_MAX_DEFAULT_SKINNY_ROWS = 64  # measured on an H200: above it the library is as fast or faster
_LARGEST_FUSED_BYTES = 12 << 20  # measured on an H200 at 16 rows: above it the skinny kernel is faster
_SKINNY_RING_BYTES = 96 << 10
_MAX_MMA_STAGES = 3  # of 32 KiB of weights


class LinearMode(IntEnum):
    """What surrounds the product; the values are those of linear_kernels.MODE_*."""

    PLAIN = 0
    GATED = 1
    RESIDUAL = 2
    ARGMAX = 3


class LinearKind(StrEnum):
    """Which implementation multiplies."""

    VECTOR = "vector"  # CUDA cores
    MMA = "mma"  # tensor cores, slices of K side by side
    SKINNY = "skinny"  # tensor cores, K cut among programs; the norm is mostly a kernel of its own
    LIBRARY = "library"  # cuBLAS, with kernels of their own around it


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What a configuration depends on: N output rows (of one half when GATED) and K input columns."""

    mode: LinearMode
    num_outputs: int
    num_inputs: int


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """One launch configuration.

    Attributes:
        kind: implementation.
        block_n: weight rows a tile (pairs when GATED).
        block_k: columns a load.
        slices: slices of K, side by side in a program (MMA) or a program each (SKINNY).
        num_warps, num_stages: as Triton means them.
        programs_per_multiprocessor: size of the persistent grid (VECTOR only).
        trigger: 1 lets the next kernel start after the first tile's loads, 0 at this kernel's end.
        block_b: rows of x a program multiplies at most (SKINNY only).
        ahead_bytes: of each weight row, asked for before the wait (SKINNY only).
        has_fixed_rows: tiles of `block_b` rows however few there are (SKINNY only).
        is_described: tiles are loaded through tensor descriptors, where the device has them (SKINNY only).
        has_tail: a program takes up to twice `block_b` rows, in two tiles of as few rows as do (SKINNY only).
        fuses_norm: each program normalises its rows of x, which no kernel has done before (SKINNY only).
    """

    kind: LinearKind
    block_n: int = 1
    block_k: int = 1024
    slices: int = 1
    num_warps: int = 4
    num_stages: int = 3
    programs_per_multiprocessor: int = 2
    trigger: int = 1
    block_b: int = 64
    ahead_bytes: int = 0
    has_fixed_rows: bool = False
    is_described: bool = False
    has_tail: bool = False
    fuses_norm: bool = False


LIBRARY_CONFIG = LinearConfig(LinearKind.LIBRARY)

_overrides: dict[str, LinearConfig] = {}


def row_bucket(num_rows: int) -> int:
    """The smallest bucket that holds num_rows (<= MAX_SKINNY_ROWS)."""
    return next(bucket for bucket in ROW_BUCKETS if num_rows <= bucket)


def config_key(device: torch.device, dtype: torch.dtype, shape: LinearShape, num_rows: int) -> str:
    """Name of one entry of the table."""
    width = dtype.itemsize * 8
    sizes = f"{shape.num_outputs}x{shape.num_inputs}"
    return f"{runtime.device_key(device)}/{width}bit/{shape.mode.name.lower()}/{sizes}/rows{row_bucket(num_rows)}"


def is_valid(config: LinearConfig, shape: LinearShape, num_rows: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can run this configuration on this shape at all."""
    if config.kind is LinearKind.LIBRARY:
        return True
    if any(side & (side - 1) for side in (config.block_n, config.block_k)):
        return False  # Triton's tiles have powers of two as sides
    if config.kind is LinearKind.VECTOR:
        fits = shape.num_outputs % config.block_n == 0 and runtime.cdiv(shape.num_inputs, config.block_k) <= _MAX_CHUNKS
        return fits and num_rows <= MAX_VECTOR_ROWS
    if config.kind is LinearKind.SKINNY:
        fits = shape.num_inputs % (config.slices * config.block_k) == 0 and num_rows <= MAX_SKINNY_ROWS
        needs_all_of_k = shape.mode is LinearMode.ARGMAX or config.fuses_norm
        has_no_norm = shape.mode is LinearMode.RESIDUAL
        return (
            dtype.itemsize == 2
            and fits
            and not (config.slices > 1 and needs_all_of_k)
            and not (config.fuses_norm and has_no_norm)
        )
    return dtype.itemsize == 2 and num_rows <= MAX_FUSED_ROWS and config.block_n >= 16


def default_config(
    shape: LinearShape, num_rows: int, dtype: torch.dtype, num_multiprocessors: int = 132
) -> LinearConfig:
    """A reasonable configuration for a shape nobody measured.

    Tiles of about 32 KiB, deep enough to keep the memory busy; the library where a tile would be ragged.
    """
    divisor = runtime.largest_power_of_two_divisor(shape.num_inputs)
    if divisor < _COLUMNS_OF_16_BYTES or shape.num_outputs < 64 or num_rows > _MAX_DEFAULT_SKINNY_ROWS:
        return LIBRARY_CONFIG
    if num_rows <= 1 or (num_rows <= 2 and dtype.itemsize == 4):
        return _default_vector(shape, dtype, num_multiprocessors)
    if dtype is not torch.bfloat16:
        # A float16 row times the norm weight could overflow before the norm's factor is applied.
        return LIBRARY_CONFIG
    num_bytes = shape.num_outputs * shape.num_inputs * dtype.itemsize * (2 if shape.mode is LinearMode.GATED else 1)
    if num_rows > MAX_FUSED_ROWS or (num_rows > 8 and num_bytes > _LARGEST_FUSED_BYTES):
        if divisor < _MIN_BLOCK_K:
            return LIBRARY_CONFIG
        block_k = min(divisor, 64 if shape.mode is LinearMode.GATED else 128)
        return _default_skinny(shape, num_rows, block_k, num_multiprocessors)
    return _default_mma(shape)


def padded_columns(num_inputs: int, columns_a_turn: int) -> int:
    """Columns of x that a loop in such turns goes over; those past num_inputs are zeros nobody loads."""
    return runtime.cdiv(num_inputs, columns_a_turn) * columns_a_turn


def _default_vector(shape: LinearShape, dtype: torch.dtype, num_multiprocessors: int) -> LinearConfig:
    """Tiles of about 8 KiB, fewer rows where the weight is too low to give every multiprocessor one.

    A thread loads 16 bytes at once, so a chunk is wide even where the row's length has no large power of two in it.
    """
    whole_row = runtime.next_power_of_2(shape.num_inputs)
    block_k = min(
        (min(whole_row, width) for width in (2048, 1024, 512)),
        key=lambda width: (padded_columns(shape.num_inputs, width), -width),
    )
    if runtime.cdiv(shape.num_inputs, block_k) > _MAX_CHUNKS:
        return LIBRARY_CONFIG
    tile_rows = 1 << (max(1, 4096 // shape.num_inputs).bit_length() - 1)
    block_n = min(tile_rows, runtime.largest_power_of_two_divisor(shape.num_outputs))
    while block_n > 1 and shape.num_outputs // block_n < num_multiprocessors:
        block_n //= 2
    tile_bytes = block_n * shape.num_inputs * dtype.itemsize
    # A weight of few tiles: one a program, or those programs with a second one are waited for.
    tiles_each = runtime.cdiv(shape.num_outputs // block_n, num_multiprocessors)
    return LinearConfig(
        LinearKind.VECTOR, block_n, block_k, num_warps=8 if tile_bytes > 16 << 10 else 4,
        num_stages=3 if tile_bytes > 24 << 10 else 4, programs_per_multiprocessor=3 if tiles_each == 3 else 2,
    )  # fmt: skip


def _default_mma(shape: LinearShape) -> LinearConfig:
    """All of K in one turn where registers hold it: every turn waits for its columns of x. Else in few turns."""
    halves = 2 if shape.mode is LinearMode.GATED else 1
    for slices, block_k in ((8, 64), (8, 128), (8, 256)):
        if block_k * halves <= 256 and slices * block_k >= shape.num_inputs:
            return LinearConfig(LinearKind.MMA, 16, block_k, slices, num_warps=slices, num_stages=2)
    slices, block_k = min(
        ((slices, 1024 // (slices * halves)) for slices in (4, 8)),
        key=lambda sizes: padded_columns(shape.num_inputs, sizes[0] * sizes[1]),
    )
    turns = runtime.cdiv(shape.num_inputs, slices * block_k)
    return LinearConfig(
        LinearKind.MMA, 16, block_k, slices, num_warps=slices, num_stages=min(turns + 1, _MAX_MMA_STAGES)
    )


def _default_skinny(shape: LinearShape, num_rows: int, block_k: int, num_multiprocessors: int) -> LinearConfig:
    """Tiles of 64 weight rows; K cut until the card is about full; a ring that leaves room for a second program."""
    is_gated, tiles = shape.mode is LinearMode.GATED, -(-shape.num_outputs // 64)
    slices = 1
    while (
        shape.mode is not LinearMode.ARGMAX
        and tiles * slices < 0.7 * num_multiprocessors
        and shape.num_inputs % (4 * slices * block_k) == 0
    ):
        slices *= 2
    stage_bytes = (128 if is_gated else 64) * block_k * 2 + max(16, num_rows) * block_k * 2
    num_stages = max(2, min(_SKINNY_RING_BYTES // stage_bytes, shape.num_inputs // (slices * block_k)))
    return LinearConfig(LinearKind.SKINNY, 64, block_k, slices, num_stages=num_stages, block_b=64)


def select_config(shape: LinearShape, num_rows: int, dtype: torch.dtype, device: torch.device) -> LinearConfig:
    """The configuration to run: measured at this number of rows, or at the next larger one that was; else the default.

    At each number of rows the user's measurement goes before the shipped one.

    Args:
        shape: mode and sizes of the weight.
        num_rows: rows of x; above MAX_SKINNY_ROWS the answer is always the library.
        dtype: of x and the weight.
        device: where it runs.
    """
    return LIBRARY_CONFIG if num_rows > MAX_SKINNY_ROWS else _measured_or_default(shape, num_rows, dtype, device)


@functools.lru_cache(maxsize=4096)  # asked for at every launch
def _measured_or_default(shape: LinearShape, num_rows: int, dtype: torch.dtype, device: torch.device) -> LinearConfig:
    if dtype is not torch.float16:  # which nobody measured, and which overflows where bfloat16 does not
        for rows in ROW_BUCKETS[ROW_BUCKETS.index(row_bucket(num_rows)) :]:
            key = config_key(device, dtype, shape, rows)
            for config in (_overrides.get(key), _SHIPPED.get(key)):
                if config is not None and is_valid(config, shape, num_rows, dtype):
                    return config
    return default_config(shape, num_rows, dtype, runtime.num_multiprocessors(device))


def config_from_row(row: tuple[str | int, ...]) -> LinearConfig:
    """Read one row of the shipped table: the fields of LinearConfig in order."""
    kind, *numbers = row
    return LinearConfig(LinearKind(kind), *(int(number) for number in numbers))


_SHIPPED = {key: config_from_row(row) for key, row in TUNED_LINEAR.items()}


def config_to_row(config: LinearConfig) -> tuple[str | int, ...]:
    """The inverse of config_from_row."""
    return tuple(value.value if isinstance(value, LinearKind) else value for value in asdict(config).values())


def set_config(key: str, config: LinearConfig) -> None:
    """Prefer a configuration to the shipped one, in this process."""
    _overrides[key] = config
    _measured_or_default.cache_clear()


def save_overrides(path: Path) -> None:
    """Write this process's preferred configurations; other entries of the file stay.

    Errors: OSError when the folder cannot be written.
    """
    rows = json.loads(path.read_text()) if path.exists() else {}
    rows.update({key: list(config_to_row(config)) for key, config in _overrides.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(rows, indent=0, sort_keys=True))
    partial.replace(path)


def load_overrides(path: Path) -> int:
    """Prefer the configurations kept in a file; returns how many were read, 0 for a missing or unreadable file."""
    try:
        rows = json.loads(path.read_text())
        configs = {key: config_from_row(tuple(row)) for key, row in rows.items()}
    except (OSError, ValueError, TypeError):
        return 0
    _overrides.update(configs)
    _measured_or_default.cache_clear()
    return len(configs)


def default_tuning_path() -> Path:
    """Where a tuner keeps its results between runs: the user's cache directory."""
    return Path.home() / ".cache" / "graphrunner" / "decode_linear.json"
