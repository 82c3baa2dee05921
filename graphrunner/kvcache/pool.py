"""The device memory of the KV cache: one pair of page tensors a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from graphrunner.core.forward_batch import KVLayer


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
    """Pages of every layer, allocated once.

    Args:
        spec: the model's needs.
        num_pages: page 0, the dummy page, included.
        page_size: tokens a page.
        dtype: of keys and values.
        device: where they live.

    Attributes:
        layers: one `KVLayer` a layer, [num_pages, page_size, num_kv_heads, head_dim]; the tensors keep their
            addresses until `release`.
    """

    def __init__(
        self, spec: KVSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        assert num_pages >= 1, "page 0 is the dummy page and always there"
        self.spec = spec
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.layers: tuple[KVLayer, ...] = ()
        self.allocate()

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_pages * self.spec.bytes_per_page(self.page_size, self.dtype)

    def allocate(self) -> None:
        """Take the memory, zeroed. After `release` this gives new addresses: graphs must be captured again."""
        self.layers = tuple(
            KVLayer(*(self._zeros(layer.num_kv_heads, layer.head_dim) for _ in range(2))) for layer in self.spec.layers
        )

    def release(self) -> None:
        """Give the memory back; `layers` is empty until the next `allocate`."""
        self.layers = ()

    def poison(self, value: float, pages: list[int] | None = None) -> None:
        """Overwrite pages (all by default) with `value`, so that a read of memory nobody owns is loud."""
        for layer in self.layers:
            for cache in (layer.k, layer.v):
                if pages is None:
                    cache.fill_(value)
                else:
                    cache[pages] = value

    def _zeros(self, num_kv_heads: int, head_dim: int) -> torch.Tensor:
        shape = (self.num_pages, self.page_size, num_kv_heads, head_dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # numpy asks the system for zeroed memory, which becomes real as pages are first written; torch would write it.
        num_bytes = math.prod(shape) * self.dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(self.dtype).view(shape)
