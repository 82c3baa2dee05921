"""Attention on the GPU, in Triton: split-KV kernels for uniform steps, one varlen kernel for every other mix."""

from __future__ import annotations

import torch

from graphrunner.attention.backend import AttentionBackend, AttentionSpec, GraphSupport
from graphrunner.core.forward_batch import ForwardBatch, KVLayer
from graphrunner.core.shape_key import ForwardMode
from graphrunner.kernels.triton import gpu_ops
from graphrunner.kernels.triton.decode_attention import MAX_QUERY_WIDTH


class TritonAttention(AttentionBackend):
    """Which kernel runs follows from the mode and the padded counts alone, so a graph key fixes it.

    Args:
        is_batch_invariant: one kernel with one tile for prompts and decode rows alike, no split of the sequence: the
            same bits for a token wherever it is computed. Long sequences decode more slowly.
    """

    name = "triton"
    graph_support = GraphSupport.ALWAYS

    def __init__(self, is_batch_invariant: bool = False) -> None:
        self._is_batch_invariant = is_batch_invariant

    def prepare_metadata(self, batch: ForwardBatch) -> gpu_ops.DecodeMetadata | gpu_ops.ExtendMetadata:
        """Views of the batch, no copies: inside a graph they are the static buffers."""
        is_uniform = batch.mode in (ForwardMode.DECODE, ForwardMode.VERIFY)
        if is_uniform and batch.num_tokens <= batch.num_reqs * MAX_QUERY_WIDTH and not self._is_batch_invariant:
            return gpu_ops.DecodeMetadata(
                positions=batch.positions,
                slot_mapping=batch.slot_mapping,
                seq_lens=batch.seq_lens,
                request_rows=batch.request_rows,
                page_table=batch.page_table,
                tree_mask=batch.tree_mask,
            )
        assert batch.tree_mask is None, "only the uniform kernel knows trees"
        return gpu_ops.ExtendMetadata(
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            seq_lens=batch.seq_lens,
            request_rows=batch.request_rows,
            page_table=batch.page_table,
            query_start_loc=batch.query_start_loc,
            has_fixed_tiles=self._is_batch_invariant,
        )

    def forward(self, spec: AttentionSpec, qkv: torch.Tensor, kv: KVLayer, batch: ForwardBatch) -> torch.Tensor:
        metadata = batch.attention_metadata
        assert isinstance(metadata, gpu_ops.DecodeMetadata | gpu_ops.ExtendMetadata), "prepare_metadata was not called"
        k_scale, v_scale = spec.cache_scales(kv.k)
        layer = gpu_ops.AttentionLayer(
            scale=spec.scale,
            cos=spec.rope_cos,
            sin=spec.rope_sin,
            q_norm_weight=spec.q_norm_weight,
            k_norm_weight=spec.k_norm_weight,
            norm_eps=spec.norm_eps,
            sliding_window=spec.sliding_window or 0,
            soft_cap=spec.soft_cap or 0.0,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return gpu_ops.rope_store_attention(qkv, layer, kv.k, kv.v, metadata)
