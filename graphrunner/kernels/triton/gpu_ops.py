"""The operations models are written in, on the GPU: the same names as kernels/reference.py, kernels chosen by shape.

Chained by programmatic dependent launch on cards that have it (capability 9.0 and later), plain launches elsewhere.
"""

from torch import Tensor

from graphrunner.kernels.triton.activation import embedding, gate_mul
from graphrunner.kernels.triton.attention_common import AttentionLayer, DecodeMetadata, ExtendMetadata
from graphrunner.kernels.triton.decode_attention import decode_attention
from graphrunner.kernels.triton.decode_linear import linear_residual, norm_gate_up, norm_linear, norm_linear_argmax
from graphrunner.kernels.triton.norms import Norm, add_rms_norm, embed_beside, rms_norm
from graphrunner.kernels.triton.prefill_attention import extend_attention
from graphrunner.kernels.triton.request_rows import (
    DecodeInputs,
    DraftInputs,
    accept_drafts,
    advance_rows,
    gather_decode_inputs,
)
from graphrunner.kernels.triton.sample import SamplingRows, greedy_tokens, reduce_argmax, sample_tokens

__all__ = [
    "AttentionLayer",
    "DecodeInputs",
    "DecodeMetadata",
    "DraftInputs",
    "ExtendMetadata",
    "Norm",
    "SamplingRows",
    "accept_drafts",
    "add_rms_norm",
    "advance_rows",
    "embed_beside",
    "embedding",
    "gate_mul",
    "gather_decode_inputs",
    "greedy_tokens",
    "linear_residual",
    "norm_gate_up",
    "norm_linear",
    "norm_linear_argmax",
    "reduce_argmax",
    "rms_norm",
    "rope_store_attention",
    "sample_tokens",
]


def rope_store_attention(
    qkv: Tensor,
    layer: AttentionLayer,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: DecodeMetadata | ExtendMetadata,
) -> Tensor:
    """The attention block between the two projections: q/k norm, rope, KV store, paged attention.

    Args:
        qkv: float [T, (Hq + 2 Hk) * D], contiguous, device; may be overwritten.
        layer: what the layer computes.
        k_cache, v_cache: float or float8_e4m3fn [num_pages, page_size, Hk, D]; written at slot_mapping.
        metadata: DecodeMetadata for a uniform step of width 1 to 8, ExtendMetadata for any mix.

    Returns:
        [T, Hq * D], dtype of qkv.

    In graph: yes. Sync: none.
    """
    if isinstance(metadata, DecodeMetadata):
        return decode_attention(qkv, layer, k_cache, v_cache, metadata)
    return extend_attention(qkv, layer, k_cache, v_cache, metadata)
