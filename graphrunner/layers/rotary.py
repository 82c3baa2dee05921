"""Rotary position embedding: the angles, as tables that every attention kernel reads.

Letters: D head_dim; tables are float32 [num_positions, D / 2] (split-half layout).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from graphrunner.config.model_config import RopeConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin of every position, the attention factor of the scaling included."""

    cos: Tensor
    sin: Tensor


def rotary_table(
    rope: RopeConfig, head_dim: int, num_positions: int, max_position: int, device: torch.device
) -> RotaryTable:
    """Build the table of one kind of layer.

    Args:
        rope: base and scaling.
        head_dim: D, all of it rotated.
        num_positions: rows of the table, at least the context limit.
        max_position: the checkpoint's context length, from which dynamic scaling counts.
        device: where the table goes; it is computed on the CPU, so every device has the same numbers.
    """
    if rope.scaling is RopeScaling.DYNAMIC:
        inverse, factor = _dynamic(rope, head_dim, num_positions, max_position), 1.0
    else:
        inverse, factor = inverse_frequencies(rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * inverse
    return RotaryTable((angles.cos() * factor).to(device), (angles.sin() * factor).to(device))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians a position turns each channel pair, float32 [D / 2], and what cos and sin are multiplied by."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = rope.theta**exponents
    if rope.scaling is RopeScaling.LINEAR:
        return 1.0 / wavelengths / rope.factor, 1.0
    if rope.scaling is RopeScaling.LLAMA3:
        return _llama3(rope, 1.0 / wavelengths), 1.0
    if rope.scaling is RopeScaling.YARN:
        return _yarn(rope, head_dim, wavelengths), _yarn_factor(rope)
    return 1.0 / wavelengths, 1.0


def _dynamic(rope: RopeConfig, head_dim: int, num_positions: int, max_position: int) -> Tensor:
    """Inverse frequencies position by position, float32 [num_positions, D / 2].

    Past `max_position` the base grows with the sequence. A cached key cannot be rotated again, so position p is
    given the base of a sequence that ends there: what decoding token by token does.

    Source: "NTK-aware" scaled RoPE as published by its authors in 2023, dynamic form.
    """
    lengths = torch.arange(1, num_positions + 1, dtype=torch.float64).clamp_min(max_position)
    growth = rope.factor * lengths / max_position - (rope.factor - 1.0)
    base = rope.theta * growth ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / base.float().unsqueeze(1) ** exponents


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Keep short wavelengths, stretch long ones by `factor`, blend in between.

    Source: the Llama 3.1 release (Meta, 2024).
    """
    assert rope.original_max_position is not None
    wavelengths = 2 * math.pi / inverse
    turns = rope.original_max_position / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * inverse / rope.factor + blend * inverse


def _yarn(rope: RopeConfig, head_dim: int, wavelengths: Tensor) -> Tensor:
    """Stretch only the channels that turn few times within the original context.

    Source: Peng et al., YaRN, 2023, sections 3.2 and 3.4.
    """
    assert rope.original_max_position is not None
    original = rope.original_max_position

    def channel_of(num_turns: float) -> float:
        return head_dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel_of(rope.beta_fast), channel_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    kept = 1.0 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    # In this order the float32 rounding is transformers' own; at position 100,000 a last bit is a visible angle.
    return 1.0 / (rope.factor * wavelengths) * (1.0 - kept) + 1.0 / wavelengths * kept


def _yarn_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def at(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return at(rope.mscale) / at(rope.mscale_all_dim)
    return at(1.0)
