"""Attention on the CPU: one C++ operator a layer, from the projected row to the attended one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrunner.attention.backend import AttentionBackend, AttentionSpec, GraphSupport
from graphrunner.attention.torch_attention import TorchAttention, used_columns
from graphrunner.core.forward_batch import ForwardBatch, KVLayer
from graphrunner.kernels.cpu import ops


@dataclass(frozen=True, slots=True)
class _Rows:
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    request_rows: torch.Tensor


class CpuAttention(AttentionBackend):
    """Reads only the keys a request can see, so the page table is passed whole and shapes stay static.

    Args:
        is_batch_invariant: sum over the keys of every token in the order that a decode row of its position has:
            the same bits in a prompt, a chunk of it, or a decode step. Prompts are slower.
    """

    name = "cpu"
    graph_support = GraphSupport.ALWAYS

    def __init__(self, is_batch_invariant: bool = False) -> None:
        self._is_batch_invariant = is_batch_invariant

    def forward(self, spec: AttentionSpec, qkv: torch.Tensor, kv: KVLayer, batch: ForwardBatch) -> torch.Tensor:
        # The kernel reads only visible keys; the twin, which other dtypes get, pays for every column.
        is_served = qkv.dtype is torch.float32 and kv.k.dtype.itemsize > 1
        page_table = batch.page_table if is_served else used_columns(batch, kv)
        rows = _rows_of(batch)
        if batch.tree_mask is not None:
            return TorchAttention().forward(spec, qkv, kv, batch)
        if self._is_batch_invariant:
            rows, page_table = _one_request_a_token(batch), batch.page_table
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
            rows.query_start_loc,
            rows.seq_lens,
            rows.request_rows,
            page_table,
            spec.scale,
            spec.sliding_window or 0,
            spec.soft_cap or 0.0,
            *spec.cache_scales(kv.k),
        )


def _rows_of(batch: ForwardBatch) -> _Rows:
    return _Rows(batch.query_start_loc, batch.seq_lens, batch.request_rows)


def _one_request_a_token(batch: ForwardBatch) -> _Rows:
    """The same step as requests of one query each; padding tokens belong to the dummy row. In graph: yes."""
    tokens = torch.arange(batch.num_tokens + 1, dtype=torch.int32, device=batch.positions.device)
    owner = torch.searchsorted(batch.query_start_loc[1:], tokens[:-1], right=True)
    is_real = owner < batch.num_reqs
    rows = torch.where(is_real, batch.request_rows[owner.clamp(max=batch.num_reqs - 1)], 0)
    return _Rows(tokens, torch.where(is_real, batch.positions + 1, 1).to(torch.int32), rows)
