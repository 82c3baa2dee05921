"""What the attention kernels share: descriptions of a step and of a layer, q/k norm with rope, score masks.

Shape legend: T tokens, R requests, W query width, Hq/Hk query/key heads, D head_dim, DP D padded to a power of two,
half = rotary_dim / 2.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphrunner.kernels.triton import runtime

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """A uniform step: every request has exactly T / R query tokens, at the end of its sequence.

    Attributes:
        positions: int64 [T], device; rope positions.
        slot_mapping: int64 [T], device; where each token's keys and values go.
        seq_lens: int32 [R], device; tokens, this step included.
        request_rows: int32 [R], device; row of each request in the page table.
        page_table: int32 [num_rows, max_pages], device.
        tree_mask: uint8 [R, W, W], device; [r, i, j] != 0 lets query i see this step's token j. None is causal.
        query_start_loc: None, or int32 [R + 1], device, of a mixed step: only its requests of one token are attended.
    """

    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    request_rows: Tensor
    page_table: Tensor
    tree_mask: Tensor | None = None
    query_start_loc: Tensor | None = None

    @property
    def query_width(self) -> int:
        """Query tokens of each request that is attended."""
        if self.query_start_loc is not None:
            return 1
        return self.positions.shape[0] // self.seq_lens.shape[0]


@dataclass(frozen=True, slots=True)
class ExtendMetadata:
    """Any mix of prompt chunks and decode rows.

    Attributes:
        positions, slot_mapping, seq_lens, request_rows, page_table: as DecodeMetadata.
        query_start_loc: int32 [R + 1], device; tokens at or past its last entry are padding.
        has_fixed_tiles: tiles of one size however many tokens there are, so that a token's sums keep their order.
    """

    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    request_rows: Tensor
    page_table: Tensor
    query_start_loc: Tensor
    has_fixed_tiles: bool = False


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one layer's attention computes.

    Attributes:
        scale: multiplies q . k.
        cos, sin: float32 [max_pos, rotary_dim / 2], split-half; None is no rope.
        q_norm_weight, k_norm_weight: float32 [D] per-head RMSNorm before rope; None is off.
        norm_eps: of those norms.
        sliding_window: keys a query sees, itself included; 0 is all.
        soft_cap: scores become cap * tanh(score / cap); 0 is off.
        k_scale, v_scale: what a stored fp8 number is multiplied by; 1 for other caches.
    """

    scale: float
    cos: Tensor | None = None
    sin: Tensor | None = None
    q_norm_weight: Tensor | None = None
    k_norm_weight: Tensor | None = None
    norm_eps: float = 1e-6
    sliding_window: int = 0
    soft_cap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def half_rotary_dim(self) -> int:
        """rotary_dim / 2; 0 without rope."""
        return 0 if self.cos is None else self.cos.shape[1]


def check_cache(k_cache: Tensor, v_cache: Tensor) -> None:
    """Refuse caches the kernels would read wrongly.

    Errors: AssertionError for a layout or a card that cannot work; the engine checks the user's setting earlier.
    """
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape == v_cache.shape
    assert k_cache.dtype is not torch.float8_e4m3fn or runtime.has_fp8(k_cache.device), "fp8 KV needs capability 8.9"


@triton.jit
def rope_angles(cos_ptr, sin_ptr, positions, is_row, DP: tl.constexpr, HALF: tl.constexpr):
    """cos and sin [rows, DP] of each row's position; 1 and 0 past the rotary channels, and everywhere without rope."""
    d = tl.arange(0, DP)
    if HALF > 0:
        is_rotary = is_row[:, None] & (d < 2 * HALF)[None, :]
        offsets = positions[:, None] * HALF + (d % HALF)[None, :]
        cos = tl.load(cos_ptr + offsets, mask=is_rotary, other=1.0)
        sin = tl.load(sin_ptr + offsets, mask=is_rotary, other=0.0)
    else:
        cos = tl.full([1, DP], 1.0, tl.float32)
        sin = tl.full([1, DP], 0.0, tl.float32)
    return cos, sin


@triton.jit
def head_norm(norm_ptr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Norm weights of a head's channels and of those they are rotated with: float32 [DP] each; 1 without a norm."""
    d = tl.arange(0, DP)
    own = tl.full([DP], 1.0, tl.float32)
    other = tl.full([DP], 1.0, tl.float32)
    if HAS_NORM:
        own = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        if HALF > 0:
            partner = tl.where(d < HALF, d + HALF, d - HALF)
            other = tl.load(norm_ptr + partner, mask=d < 2 * HALF, other=0.0).to(tl.float32)
    return own, other


@triton.jit
def load_heads(
    base_ptr, row_offsets, is_row, own, other, cos, sin, eps, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Load head rows, normalise and rotate them: float32 [rows, DP], zero past D and in rows that are not real.

    own and other are `head_norm`'s; cos and sin are `rope_angles`' ([rows, DP], or [1, DP] for all rows).
    """
    d = tl.arange(0, DP)
    is_real = is_row[:, None] & (d < D)[None, :]
    x = tl.load(base_ptr + row_offsets[:, None] + d[None, :], mask=is_real, other=0.0).to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * factor * own[None, :]
    if HALF > 0:
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        is_rotary = is_row[:, None] & (d < 2 * HALF)[None, :]
        y = tl.load(base_ptr + row_offsets[:, None] + partner[None, :], mask=is_rotary, other=0.0).to(tl.float32)
        if HAS_NORM:
            y = y * factor * other[None, :]
        x = x * cos + tl.where(d < HALF, -1.0, 1.0)[None, :] * y * sin
    return x


@triton.jit
def load_rotated(
    base_ptr, row_offsets, is_row, positions, norm_ptr, cos_ptr, sin_ptr, eps, D: tl.constexpr, DP: tl.constexpr,
    HALF: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """`load_heads` with all that it needs."""
    own, other = head_norm(norm_ptr, D, DP, HALF, HAS_NORM)
    cos, sin = rope_angles(cos_ptr, sin_ptr, positions, is_row, DP, HALF)
    return load_heads(base_ptr, row_offsets, is_row, own, other, cos, sin, eps, D, DP, HALF, HAS_NORM)


@triton.jit
def to_cache(x, inverse_scale, dtype: tl.constexpr, IS_FP8: tl.constexpr):
    """Round to the cache's dtype; fp8 saturates instead of overflowing to NaN."""
    if IS_FP8:
        x = tl.clamp(x * inverse_scale, -448.0, 448.0)
    return x.to(dtype)


@triton.jit
def masked_scores(scores, is_visible, scale_log2, soft_cap, HAS_CAP: tl.constexpr):
    """Scores in units of log2, capped, with invisible keys far below everything (finite: no inf - inf)."""
    if HAS_CAP:
        # scale_log2 / log2(e) is the plain scale; tanh(x) = 2 sigmoid(2 x) - 1.
        plain = scores * (scale_log2 / 1.4426950408889634)
        scores = soft_cap * (2.0 * tl.sigmoid(2.0 * plain / soft_cap) - 1.0) * 1.4426950408889634
    else:
        scores = scores * scale_log2
    return tl.where(is_visible, scores, -1.0e30)


@triton.jit
def softmax_step(scores, is_visible, values, m, total, acc):
    """One step of the running softmax: returns the new maximum, sum and weighted values."""
    new_m = tl.maximum(m, tl.max(scores, 1))
    p = tl.where(is_visible, tl.exp2(scores - new_m[:, None]), 0.0)
    decay = tl.exp2(m - new_m)
    acc = tl.dot(p.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return new_m, total * decay + tl.sum(p, 1), acc
