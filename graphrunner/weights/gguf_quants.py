"""GGUF block formats and their dequantization, in plain torch so that it runs where the weights will live.

A tensor's rows are cut into blocks of 32 (or 256 for the K types) values; every block carries its own scales. Each
function below takes blocks as uint8 [num_blocks, block_bytes] and returns fp32 [num_blocks, block_len]. The order
of operations is that of ggml's reference code, so results are equal to the bit.
Source: ggml-quants.c and ggml-common.h of llama.cpp (formats only).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch
from torch import Tensor

from graphrunner.core.errors import ModelLoadError

# Values handled at a time: bounds the fp32 temporaries (about 10 of this size) and keeps them in cache.
_CHUNK_VALUES = 1 << 20


class GGMLType(IntEnum):
    """Tensor types this reader understands, by their number in the file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30

    @property
    def block_len(self) -> int:
        """Values in one block."""
        return _LAYOUT[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return _LAYOUT[self][1]


_LAYOUT = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.BF16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
}
_PLAIN = {GGMLType.F32: torch.float32, GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}
_UNSUPPORTED_NAMES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def ggml_type(number: int, tensor_name: str, path: str) -> GGMLType:
    """The type with this number, or a ModelLoadError that names the tensor."""
    try:
        return GGMLType(number)
    except ValueError:
        name = _UNSUPPORTED_NAMES.get(number, f"number {number}")
        known = ", ".join(one.name for one in GGMLType)
        raise ModelLoadError(
            f"{path}: tensor {tensor_name} has the unsupported GGUF type {name} (supported: {known})"
        ) from None


def dequantize(raw: Tensor, kind: GGMLType, out: Tensor, round_to: torch.dtype | None = None) -> None:
    """Write the values of `raw` into `out`.

    Args:
        raw: uint8 [num_bytes]; moved to out's device chunk by chunk.
        out: any float dtype, contiguous, as many values as raw encodes.
        round_to: round each value to this dtype on the way.
    """
    flat = out.view(-1)
    blocks_at_once = max(1, _CHUNK_VALUES // kind.block_len)
    step = blocks_at_once * kind.block_bytes
    for start in range(0, raw.numel(), step):
        piece = raw[start : start + step].to(out.device)
        first = start // kind.block_bytes * kind.block_len
        if kind in _PLAIN:
            # A tensor's bytes may start at an address that its dtype may not: the clone is aligned.
            values = piece.clone().view(_PLAIN[kind])
        else:
            values = _BLOCK_FUNCTIONS[kind](piece.view(-1, kind.block_bytes)).reshape(-1)
        if round_to is not None:
            values = values.to(round_to)
        flat[first : first + values.numel()].copy_(values)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The fp16 number at byte `start` of every block, as fp32 [num_blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [num_blocks, n] -> uint8 [num_blocks, 2n]: all low nibbles, then all high ones."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=-1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Bit i of the 32-bit word at `start`, moved to weight 16: uint8 [num_blocks, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    bits = (blocks[:, start : start + 4, None] >> shifts) & 1
    return bits.view(-1, 32) << 4


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8.0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (quants.float() - 16.0)


def _q5_1(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * quants.float() + _half(blocks, 2)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The eight 6-bit scales and minima of a K block, times the block's own: fp32 [num_blocks, 8, 1] each.

    Twelve bytes: the first eight hold four scales and four minima in their low six bits, and in their top two bits
    the top bits of the other four pairs, whose low four bits share the last four bytes.
    """
    packed = blocks[:, 4:16].view(-1, 3, 4)
    low, middle, high = packed.unbind(1)
    scales = torch.cat((low & 0x3F, (high & 0x0F) | ((low >> 6) << 4)), dim=-1)
    minima = torch.cat((middle & 0x3F, (high >> 4) | ((middle >> 6) << 4)), dim=-1)
    return (_half(blocks, 0) * scales.float())[..., None], (_half(blocks, 2) * minima.float())[..., None]


def _k_nibbles(packed: Tensor) -> Tensor:
    """uint8 [num_blocks, 128] -> [num_blocks, 8, 32]: each 32 bytes hold two sub-blocks, low nibbles first."""
    return _nibbles(packed.reshape(-1, 4, 32)).view(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks)
    return scales * _k_nibbles(blocks[:, 16:]).float() - minima


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    fifth = ((blocks[:, None, 16:48] >> shifts) & 1) << 4
    return scales * (_k_nibbles(blocks[:, 48:]) | fifth).float() - minima


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    quants = (low | high).float().view(-1, 16, 16) - 32.0
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (_half(blocks, 208) * scales)[..., None] * quants


_BLOCK_FUNCTIONS: dict[GGMLType, Callable[[Tensor], Tensor]] = {
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}
