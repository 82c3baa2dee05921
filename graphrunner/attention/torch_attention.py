"""The oracle: attention in plain torch, on any device."""

from __future__ import annotations

import torch

from graphrunner.attention.backend import AttentionBackend, AttentionSpec, GraphSupport
from graphrunner.core.forward_batch import ForwardBatch, KVLayer
from graphrunner.kernels import reference


class TorchAttention(AttentionBackend):
    """The reference twin of every attention kernel. Obvious before fast; nothing in it looks at a tensor's value."""

    name = "torch"
    graph_support = GraphSupport.ALWAYS

    def forward(self, spec: AttentionSpec, qkv: torch.Tensor, kv: KVLayer, batch: ForwardBatch) -> torch.Tensor:
        return reference.rope_store_attention(
            qkv,
            spec.rope_cos,
            spec.rope_sin,
            spec.q_norm_weight,
            spec.k_norm_weight,
            spec.norm_eps,
            kv.k,
            kv.v,
            batch.positions,
            batch.slot_mapping,
            batch.query_start_loc,
            batch.seq_lens,
            batch.request_rows,
            used_columns(batch, kv),
            spec.scale,
            spec.sliding_window or 0,
            spec.soft_cap or 0.0,
            *spec.cache_scales(kv.k),
            batch.tree_mask,
        )


def used_columns(batch: ForwardBatch, kv: KVLayer) -> torch.Tensor:
    """The page table cut to the columns that `max_seq_len` tokens can reach: int32 [num_rows, columns], a view."""
    page_size = kv.k.shape[1]
    return batch.page_table[:, : max(1, -(-batch.max_seq_len // page_size))]
