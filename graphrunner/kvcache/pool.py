"""The device memory of the KV cache: one pair of page tensors a layer."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

import torch

from graphrunner.core.forward_batch import KVLayer
from graphrunner.device.memory_range import MemoryRange
from graphrunner.device.registry import device_of


@dataclass(frozen=True, slots=True)
class KVLayerSpec:
    """What one layer keeps for a token."""

    num_kv_heads: int
    head_dim: int

    @property
    def elements_per_token(self) -> int:
        """Numbers kept for one token, keys and values together."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a model keeps for a token, layer by layer, on this rank."""

    layers: tuple[KVLayerSpec, ...]

    def bytes_per_page(self, page_size: int, dtype: torch.dtype) -> int:
        """Bytes that one page takes in all layers together."""
        return page_size * dtype.itemsize * sum(layer.elements_per_token for layer in self.layers)


class KVPool:
    """Pages of every layer, at addresses that stay: graphs are recorded on them before it is known how many there are.

    Args:
        spec: the model's needs.
        num_pages: page 0, the dummy page, included; with `committed_pages` the most there can be.
        page_size: tokens a page.
        dtype: of keys and values.
        device: where they live.
        committed_pages: pages that have memory at once, at least 1; `commit` brings the others. None is all of them.

    Attributes:
        layers: one `KVLayer` a layer, [num_pages, page_size, num_kv_heads, head_dim]; always the same tensors. They
            are as long as the addresses reach until `commit` cuts them to what there is.
        num_pages: as in `layers`.
        can_grow: whether the device can bring pages later; if not, all of them are there from the start.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        committed_pages: int | None = None,
    ) -> None:
        assert num_pages >= 1, "page 0 is the dummy page and always there"
        self.spec = spec
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = device_of(torch.device(device))
        self._page_bytes = [KVSpec((layer,)).bytes_per_page(page_size, dtype) // 2 for layer in spec.layers] * 2
        self._ranges = [self.device.memory_range(num_pages * num_bytes) for num_bytes in self._page_bytes]
        self.can_grow = all(each.can_grow for each in self._ranges)
        self._commit(committed_pages or num_pages)
        keys, values = self._ranges[: len(spec.layers)], self._ranges[len(spec.layers) :]
        self.layers: tuple[KVLayer, ...] = tuple(
            KVLayer(self._view(k, layer), self._view(v, layer))
            for layer, k, v in zip(spec.layers, keys, values, strict=True)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.spec.bytes_per_page(self.page_size, self.dtype)

    def fitting_pages(self, budget_bytes: int) -> int:
        """The most pages that fit into a budget, which pays for those that have memory already, too; at most all."""
        return bisect_right(range(1, self.num_pages + 1), budget_bytes, key=self.committed_bytes)

    def committed_bytes(self, num_pages: int) -> int:
        """Memory that a commit of `num_pages` takes: it comes in the device's granules."""
        sizes = (
            -(-num_pages * page_bytes // each.granularity_bytes) * each.granularity_bytes
            for each, page_bytes in zip(self._ranges, self._page_bytes, strict=True)
        )
        return sum(sizes)

    def commit(self, num_pages: int) -> None:
        """Make it a pool of `num_pages`, the new ones zeroed, the others as they are.

        Raises:
            MemoryError: the device has not that much. `release` gives back what there is by then.
        """
        assert num_pages <= self.num_pages, f"there are addresses for {self.num_pages} pages, not for {num_pages}"
        self._commit(num_pages)
        self.num_pages = num_pages
        for layer in self.layers:
            for cache in (layer.k, layer.v):
                cache.resize_(num_pages, *cache.shape[1:])  # a new length for everyone who holds the tensor

    def reopen(self) -> None:
        """After `release`: memory for the dummy page, so that graphs can be recorded. `commit` brings the rest."""
        self._commit(1)

    def release(self) -> None:
        """Give all memory back. Nobody may touch a page until it is there again. Sync: waits for the device."""
        self.device.synchronize()
        for each in self._ranges:
            each.decommit()

    def poison(self, value: float, pages: list[int] | None = None) -> None:
        """Overwrite pages (all by default) with `value`, so that a read of memory nobody owns is loud."""
        for layer in self.layers:
            for cache in (layer.k, layer.v):
                if pages is None:
                    cache.fill_(value)
                else:
                    cache[pages] = value

    def _commit(self, num_pages: int) -> None:
        for each, page_bytes in zip(self._ranges, self._page_bytes, strict=True):
            each.commit(num_pages * page_bytes)

    def _view(self, memory: MemoryRange, layer: KVLayerSpec) -> torch.Tensor:
        shape = (self.num_pages, self.page_size, layer.num_kv_heads, layer.head_dim)
        num_bytes = math.prod(shape) * self.dtype.itemsize
        return memory.tensor()[:num_bytes].view(self.dtype).view(shape)
