"""Attention through FlashInfer, an optional extra: `pip install graphrunner[flashinfer]`.

Eager only. FlashInfer plans each step on the host from lengths, once per distinct mix of window, cap and scale; so it
reads the lengths back (one sync a step) and declares that it cannot run inside a graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from graphrunner.attention.backend import AttentionBackend, AttentionSpec, GraphSupport
from graphrunner.core.forward_batch import ForwardBatch, KVLayer
from graphrunner.kernels import reference

_WORKSPACE_BYTES = 256 << 20
_PlanKey = tuple[int, int, int, float, int, float]


@dataclass(frozen=True, slots=True)
class _Step:
    """The step in FlashInfer's terms: int32 tensors, device, and the kinds of layer planned so far."""

    query_start_loc: torch.Tensor
    page_start_loc: torch.Tensor
    page_indices: torch.Tensor
    last_page_lens: torch.Tensor
    num_tokens: int
    planned: set[_PlanKey] = field(default_factory=set)


class FlashInferAttention(AttentionBackend):
    """Rope, norms and the KV store are ours; the attention itself is FlashInfer's paged prefill kernel.

    Raises:
        ImportError: FlashInfer is not installed.
    """

    name = "flashinfer"
    graph_support = GraphSupport.NEVER

    def __init__(self, device: torch.device) -> None:
        import flashinfer

        self._wrapper_class = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_PlanKey, object] = {}

    def prepare_metadata(self, batch: ForwardBatch) -> _Step:
        """Turn table rows into FlashInfer's list of pages. Sync: one."""
        page_size = batch.kv_layers[0].k.shape[1]
        starts = batch.query_start_loc.tolist()
        # Padding requests have no queries; FlashInfer is not told about them.
        num_reqs = sum(last > first for first, last in pairwise(starts))
        seq_lens = batch.seq_lens[:num_reqs]
        num_pages = (seq_lens + page_size - 1) // page_size
        column = torch.arange(batch.page_table.shape[1], device=seq_lens.device)
        rows = batch.page_table[batch.request_rows[:num_reqs].long()]
        page_start_loc = torch.nn.functional.pad(num_pages.cumsum(0), (1, 0)).int()
        return _Step(
            query_start_loc=batch.query_start_loc[: num_reqs + 1],
            page_start_loc=page_start_loc,
            page_indices=rows[column < num_pages.unsqueeze(1)].int(),
            last_page_lens=((seq_lens - 1) % page_size + 1).int(),
            num_tokens=starts[num_reqs],
        )

    def forward(self, spec: AttentionSpec, qkv: torch.Tensor, kv: KVLayer, batch: ForwardBatch) -> torch.Tensor:
        step = batch.attention_metadata
        assert isinstance(step, _Step), "prepare_metadata was not called"
        num_q, num_kv = spec.num_q_heads, spec.num_kv_heads
        q, k, v = qkv.view(qkv.shape[0], -1, spec.head_dim).split([num_q, num_kv, num_kv], dim=1)
        if spec.q_norm_weight is not None:
            q = reference.rms_norm(q, spec.q_norm_weight, spec.norm_eps)
        if spec.k_norm_weight is not None:
            k = reference.rms_norm(k, spec.k_norm_weight, spec.norm_eps)
        if spec.rope_cos is not None and spec.rope_sin is not None:
            q = reference.apply_rope(q, spec.rope_cos, spec.rope_sin, batch.positions)
            k = reference.apply_rope(k, spec.rope_cos, spec.rope_sin, batch.positions)
        k_scale, v_scale = spec.cache_scales(kv.k)
        reference.store_kv(k, v, kv.k, kv.v, batch.slot_mapping, k_scale, v_scale)
        scales = {"k_scale": k_scale, "v_scale": v_scale} if kv.k.dtype.itemsize == 1 else {}
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        wrapper = self._planned(spec, step, kv, q.dtype)
        out[: step.num_tokens] = wrapper.run(  # type: ignore[attr-defined]
            q[: step.num_tokens].contiguous(), (kv.k, kv.v), **scales
        )
        return out.flatten(1)

    def _planned(self, spec: AttentionSpec, step: _Step, kv: KVLayer, dtype: torch.dtype) -> object:
        window_left = -1 if spec.sliding_window is None else spec.sliding_window - 1
        soft_cap = spec.soft_cap or 0.0
        key = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.scale, window_left, soft_cap)
        if key not in self._wrappers:
            self._wrappers[key] = self._wrapper_class(self._workspace.clone(), "NHD")
        wrapper = self._wrappers[key]
        if key not in step.planned:
            wrapper.plan(  # type: ignore[attr-defined]
                step.query_start_loc,
                step.page_start_loc,
                step.page_indices,
                step.last_page_lens,
                spec.num_q_heads,
                spec.num_kv_heads,
                spec.head_dim,
                kv.k.shape[1],
                causal=True,
                sm_scale=spec.scale,
                window_left=window_left,
                logits_soft_cap=soft_cap,
                q_data_type=dtype,
                kv_data_type=kv.k.dtype,
            )
            step.planned.add(key)
        return wrapper
