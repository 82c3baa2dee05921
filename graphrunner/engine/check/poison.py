"""Poison: values that must never be read, in every place that must never be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from graphrunner.kvcache.page_allocator import DUMMY_PAGE
from graphrunner.runner.runner_context import RunnerContext

VALID_GARBAGE = 1
"""What integer buffers are filled with before a load: a valid row, token, position and slot, and never the right one
for long. Anything out of range would bring a device down instead of telling where it was read."""
_BYTE_POISON = 0x7F
"""NaN as an 8-bit float, the largest number as an int8."""


class PoisonedPages:
    """Keeps NaN in the dummy page and in every free page; integers get their largest value.

    Args:
        context: whose pages.
        free_pages: the pages that nobody owns now.
    """

    def __init__(self, context: RunnerContext, free_pages: Callable[[], Iterable[int]]) -> None:
        self._context = context
        self._free_pages = free_pages
        self._poisoned: set[int] = set()

    def renew(self) -> list[int]:
        """Poison what is free now; pages that were poisoned, got an owner since, and hold something else.

        Called before a step has written anything. Sync: reads back when pages changed hands.
        """
        layers = self._context.kv_layers
        if not layers:
            return []
        free = set(self._free_pages())
        strays = self._changed(self._poisoned - free)
        self._fill([DUMMY_PAGE, *(free - self._poisoned)])
        self._poisoned = free
        return strays

    def forget(self) -> None:
        """The pages have new memory, in which there is no poison."""
        self._poisoned = set()

    def _changed(self, pages: set[int]) -> list[int]:
        if not pages:
            return []
        numbers = sorted(pages)
        index = torch.tensor(numbers, device=self._context.device)
        is_changed = torch.zeros(len(numbers), dtype=torch.bool, device=self._context.device)
        for layer in self._context.kv_layers:
            for cache in (layer.k, layer.v):
                is_changed |= ~_is_poison(_bytes_or_self(cache)[index].flatten(1)).all(dim=1)
        return [page for page, is_off in zip(numbers, is_changed.tolist(), strict=True) if is_off]

    def _fill(self, pages: list[int]) -> None:
        index = torch.tensor(pages, device=self._context.device)
        for layer in self._context.kv_layers:
            for cache in (layer.k, layer.v):
                view = _bytes_or_self(cache)
                view[index] = float("nan") if view.is_floating_point() else _BYTE_POISON


def _bytes_or_self(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def _is_poison(values: Tensor) -> Tensor:
    return values.isnan() if values.is_floating_point() else values == _BYTE_POISON
