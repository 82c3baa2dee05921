"""Attention on the CPU: one C++ operator a layer, from the projected row to the attended one."""

from __future__ import annotations

import torch

from graphrunner.attention.backend import AttentionBackend, AttentionSpec, GraphSupport
from graphrunner.attention.torch_attention import used_columns
from graphrunner.core.forward_batch import ForwardBatch, KVLayer
from graphrunner.kernels.cpu import ops


class CpuAttention(AttentionBackend):
    """Reads only the keys a request can see, so the page table is passed whole and shapes stay static."""

    name = "cpu"
    graph_support = GraphSupport.ALWAYS

    def forward(self, spec: AttentionSpec, qkv: torch.Tensor, kv: KVLayer, batch: ForwardBatch) -> torch.Tensor:
        # The kernel reads only visible keys; the twin, which other dtypes get, pays for every column.
        is_served = qkv.dtype is torch.float32 and kv.k.dtype.itemsize > 1
        page_table = batch.page_table if is_served else used_columns(batch, kv)
        return ops.rope_store_attention(
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
            page_table,
            spec.scale,
            spec.sliding_window or 0,
            spec.soft_cap or 0.0,
            *spec.cache_scales(kv.k),
        )
