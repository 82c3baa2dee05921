"""Tokens that a draft's KV lacks: those of plain steps that nobody told it about, while speculation did not pay.

When it pays again, the draft attends to them like to all others. What it would find there is of whoever had the page
before, or of nobody: numbers of any size, NaN among them. So these places become zeros first, which say nothing.

Zeros serve the request itself, whose pages have nothing better. Later ones draft better with what they compute anew, so
pages from the first hole on are not for the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.device.transfer import to_device
from graphrunner.runner.gather_rows import slots_of
from graphrunner.runner.runner_context import RunnerContext


class MissedTokens:
    """Remembers where each row's holes begin, and closes them.

    Args:
        context: of the draft: its own KV layers.
    """

    def __init__(self, context: RunnerContext) -> None:
        self._context = context
        self._first: dict[int, int] = {}  # by row, the position of the first token that was missed and is not closed
        self._filled: dict[int, int] = {}  # by row with holes, closed or not: the position of the first

    def forget(self, rows: Iterable[int]) -> None:
        """Someone new has the rows."""
        for row in rows:
            self._first.pop(row, None)
            self._filled.pop(row, None)

    def miss(self, batch: ScheduledBatch) -> None:
        """The draft is not told about this step."""
        for row, cached_len in zip(batch.rows, batch.cached_lens, strict=True):
            self._first.setdefault(row, cached_len)
            self._filled.setdefault(row, cached_len)

    def filled_len(self, row: int) -> int | None:
        """How many of a row's tokens come before its first hole; None where it has none."""
        return self._filled.get(row)

    def close(self, batch: ScheduledBatch) -> None:
        """The draft is told about this step: zero what its rows lack before it. Sync: none."""
        if not self._first:
            return
        rows: list[int] = []
        positions: list[int] = []
        for row, cached_len in zip(batch.rows, batch.cached_lens, strict=True):
            hole = range(self._first.pop(row, cached_len), cached_len)
            positions.extend(hole)
            rows.extend([row] * len(hole))
        if not rows:
            return
        context = self._context
        places = to_device(torch.tensor([rows, positions], dtype=torch.int64), context.device)
        slots = slots_of(context.table, places[0], places[1], context.page_size)
        for layer in context.kv_layers:
            for half in (layer.k, layer.v):
                tokens = half.view(-1, half.shape[2] * half.shape[3])
                tokens = tokens.view(torch.uint8) if tokens.dtype.itemsize == 1 else tokens
                tokens.index_fill_(0, slots, 0)
