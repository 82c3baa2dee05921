"""How decode attention is cut: splits of a sequence and tiles, measured where there is a measurement."""

from dataclasses import dataclass

import torch

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.tuned_configs import TUNED_ATTENTION

REQUEST_BUCKETS = (1, 4, 16, 32, 48, 64, 96, 128, 192, 224, 256)
_MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class DecodeAttentionConfig:
    """Launch configuration.

    Attributes:
        num_splits: programs that may share a sequence.
        block_n: tokens a tile.
        num_warps, num_stages: as Triton names them.
        min_split_tokens: a sequence is shared by fewer programs rather than have less than this for each.
    """

    num_splits: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 3
    min_split_tokens: int = 0

    @property
    def min_tiles(self) -> int:
        """Tiles a split has at least."""
        return max(1, runtime.cdiv(self.min_split_tokens, self.block_n))


def default_decode_config(
    num_requests: int, num_kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> DecodeAttentionConfig:
    """Splits that fill the card about twice, from sizes a graph key fixes; tiles that leave room for two programs."""
    num_splits = num_splits_for(2 * runtime.num_multiprocessors(device), num_requests * num_kv_heads)
    padded_dim = runtime.next_power_of_2(head_dim)
    block_n = max(16, min(128 if padded_dim <= 64 else 64, 8192 // padded_dim) // (2 if dtype.itemsize == 4 else 1))
    return DecodeAttentionConfig(num_splits, block_n)


def attention_key(
    num_requests: int, num_kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype, query_width: int = 1
) -> str:
    """Name of one entry of the table of measured configurations; requests are bucketed, and all widths but 1 alike."""
    bucket = next(bucket for bucket in REQUEST_BUCKETS if num_requests <= bucket or bucket == REQUEST_BUCKETS[-1])
    return f"{_prefix(num_kv_heads, head_dim, device, dtype)}/{_kind(query_width)}{bucket}"


def _prefix(num_kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> str:
    return f"{runtime.device_key(device)}/{dtype.itemsize * 8}bit/{num_kv_heads}x{head_dim}"


def _kind(query_width: int) -> str:
    return "verify" if query_width > 1 else "requests"


def _measured_row(num_requests: int, prefix: str, kind: str) -> tuple[int, int, int, int, int] | None:
    """What was measured at this number of requests, or at the next larger one that was."""
    num_requests = min(num_requests, REQUEST_BUCKETS[-1])
    found = (TUNED_ATTENTION.get(f"{prefix}/{kind}{bucket}") for bucket in REQUEST_BUCKETS if bucket >= num_requests)
    return next((row for row in found if row is not None), None)


def select_decode_config(
    num_requests: int, num_kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype, query_width: int = 1
) -> DecodeAttentionConfig:
    """The measured tiles for these sizes, else the default; the splits always follow from the sizes themselves.

    A verify step that nobody measured runs the tiles of the decode step.
    """
    default = default_decode_config(num_requests, num_kv_heads, head_dim, device, dtype)
    prefix = _prefix(num_kv_heads, head_dim, device, dtype)
    row = _measured_row(num_requests, prefix, _kind(query_width)) or _measured_row(num_requests, prefix, _kind(1))
    if row is None:
        return default
    programs_per_multiprocessor, block_n, num_warps, num_stages, min_split_tokens = row
    num_programs = programs_per_multiprocessor * runtime.num_multiprocessors(device)
    num_splits = num_splits_for(num_programs, num_requests * num_kv_heads)
    return DecodeAttentionConfig(num_splits, block_n, num_warps, num_stages, min_split_tokens)


def num_splits_for(num_programs: int, pairs: int) -> int:
    """The largest power of two that keeps the grid within num_programs.

    Args:
        num_programs: wanted on the whole card.
        pairs: requests times key heads.
    """
    num_splits = 1
    while num_splits * 2 * pairs <= num_programs and num_splits < _MAX_SPLITS:
        num_splits *= 2
    return num_splits
