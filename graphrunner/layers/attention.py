"""The attention of one layer, as models see it: its numbers, its place in the cache, and nothing about kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn

from graphrunner.attention.backend import AttentionSpec
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.device.graph import eager_break
from graphrunner.layers.loading import WeightSlot, prefixed
from graphrunner.layers.norm import RMSNorm


class PagedAttention(nn.Module):
    """q/k norm, rotary embedding, KV store and attention of one layer: [T, (Hq + 2 Hk) D] -> [T, Hq D].

    Args:
        spec: what is computed.
        layer_index: which KV pages.
        norms: the q and k norms whose weights `spec` refers to, so that they are loaded with this layer.
    """

    def __init__(self, spec: AttentionSpec, layer_index: int, norms: tuple[RMSNorm, ...] = ()) -> None:
        super().__init__()
        self.spec = spec
        self.layer_index = layer_index
        self.norms = nn.ModuleList(norms)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from prefixed("", *self.norms)
        yield WeightSlot("self_attn.k_scale", (), self._put_k_scale, is_optional=True)
        yield WeightSlot("self_attn.v_scale", (), self._put_v_scale, is_optional=True)

    # Scales are numbers of a launch, not memory: what was recorded before a reload keeps those it was made with.
    def _put_k_scale(self, value: Tensor) -> None:
        self.spec = replace(self.spec, k_scale=float(value))

    def _put_v_scale(self, value: Tensor) -> None:
        self.spec = replace(self.spec, v_scale=float(value))

    def forward(self, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        return eager_break(self._attend, batch, qkv)

    def _attend(self, batch: ForwardBatch, qkv: Tensor) -> Tensor:
        return batch.attention.forward(self.spec, qkv, batch.kv_layers[self.layer_index], batch)
