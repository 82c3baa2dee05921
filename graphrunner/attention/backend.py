"""What an attention backend promises to models and runners."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from graphrunner.core.forward_batch import ForwardBatch, KVLayer


class GraphSupport(IntEnum):
    """What a backend can do inside a recorded graph; a mixed model takes the minimum."""

    NEVER = 0
    DECODE = 1  # one query token a request
    UNIFORM = 2  # the same number of query tokens a request
    ALWAYS = 3  # any mix


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention computes, fixed when the model is built.

    Attributes:
        num_q_heads, num_kv_heads, head_dim: of this rank.
        scale: multiplies q . k.
        sliding_window: tokens a query sees, itself included; None is all.
        soft_cap: scores become cap * tanh(score / cap); None is off.
        q_norm_weight, k_norm_weight: fp32 [head_dim] RMSNorm per head before rope; None is off.
        norm_eps: of those norms.
        k_scale, v_scale: what a number in an fp8 cache is multiplied by; other caches ignore them.
        rope_cos, rope_sin: fp32 [max_position, rotary_dim / 2], device, split-half layout; None is no rope.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    q_norm_weight: torch.Tensor | None = None
    k_norm_weight: torch.Tensor | None = None
    norm_eps: float = 1e-6
    k_scale: float = 1.0
    v_scale: float = 1.0
    rope_cos: torch.Tensor | None = None
    rope_sin: torch.Tensor | None = None

    def cache_scales(self, cache: torch.Tensor) -> tuple[float, float]:
        """What keys and values read from this cache are multiplied by: 1 unless it holds 8-bit numbers."""
        return (self.k_scale, self.v_scale) if cache.dtype.itemsize == 1 else (1.0, 1.0)


class AttentionBackend(ABC):
    """Paged causal attention over `ForwardBatch`.

    `prepare_metadata` runs outside the graph and may use host integers; `forward` may run inside one and reads
    nothing but device tensors of the batch. Every backend passes one conformance suite against `TorchAttention`.
    """

    name: str
    graph_support: GraphSupport
    pad_seq_len: int = 1
    """What `seq_lens` holds for padding rows: kernels neither divide by it nor wait on it."""

    def prepare_metadata(self, batch: ForwardBatch) -> object:
        """Build what `forward` needs beyond the batch itself, once a step (or once a captured shape).

        Args:
            batch: the padded device view; `attention_metadata` is not set yet.

        Returns:
            An opaque value that becomes `batch.attention_metadata`. Its tensors must keep their addresses
            between steps of the same key.
        """
        return None

    @abstractmethod
    def forward(self, spec: AttentionSpec, qkv: torch.Tensor, kv: KVLayer, batch: ForwardBatch) -> torch.Tensor:
        """Normalise and rotate q and k, store k and v, attend.

        Args:
            qkv: model dtype [T, (num_q_heads + 2 * num_kv_heads) * head_dim], device; q heads, k heads, v heads.
            kv: this layer's pages; the step's k and v are written at `batch.slot_mapping`.

        Returns:
            model dtype [T, num_q_heads * head_dim], device. Rows of padding tokens are unspecified but finite or
            not, they never reach a real row.

        In graph: yes, up to `graph_support`. Sync: none.
        """
