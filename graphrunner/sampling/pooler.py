"""Hidden states of embedding requests into one vector each, over as many chunks as their prompts came in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphrunner.core.pooling import Pooling
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.sampling.sampled_tokens import HostCopy, LazyEntries

Vector = tuple[float, ...]


@dataclass(slots=True)
class _PooledRow:
    """One request: fp32 [hidden_size] on the device, the sum of what its chunks gave so far."""

    pooling: Pooling
    prompt_len: int
    total: Tensor | None = None


class Pooler:
    """Keeps a running sum for each embedding request; a row that starts anew (preemption) starts with none.

    Args:
        final_norm: the model's norm before its head, model dtype [rows, hidden_size] -> the same.
    """

    def __init__(self, final_norm: Callable[[Tensor], Tensor]) -> None:
        self._final_norm = final_norm
        self._rows: dict[int, _PooledRow] = {}

    def apply(self, batch: ScheduledBatch) -> None:
        """Take in new and resumed rows. No work in a steady step."""
        for init in batch.row_inits:
            if init.pooling is None:
                self._rows.pop(init.row, None)
            else:
                self._rows[init.row] = _PooledRow(init.pooling, len(init.prompt_token_ids))

    def pool(self, hidden_states: Tensor, batch: ScheduledBatch) -> Sequence[Vector | None]:
        """Add this step's chunks.

        Args:
            hidden_states: model dtype [num_tokens, hidden_size], device, before the final norm.
            batch: the step they are of.

        Returns:
            By request of the batch, the vector of a prompt that ended in this step; empty when none did. Sync: none;
            the first read waits for the copy.
        """
        ended: dict[int, Tensor] = {}
        start = 0
        for index, (row, query_len) in enumerate(zip(batch.rows, batch.query_lens, strict=True)):
            pooled = self._rows.get(row)
            if pooled is not None:
                end_len = batch.cached_lens[index] + query_len
                self._add(pooled, hidden_states[start : start + query_len], end_len)
                if end_len == pooled.prompt_len:
                    ended[index] = self._finished(self._rows.pop(row))
            start += query_len
        if not ended:
            return ()
        copy = HostCopy(torch.stack(list(ended.values())))

        def make() -> list[Vector | None]:
            columns: list[Vector | None] = [None] * batch.num_reqs
            for index, values in zip(ended, copy.wait()[0].tolist(), strict=True):
                columns[index] = tuple(values)
            return columns

        return LazyEntries(batch.num_reqs, make)

    def _add(self, pooled: _PooledRow, chunk: Tensor, end_len: int) -> None:
        if pooled.pooling is Pooling.LAST:
            if end_len == pooled.prompt_len:
                pooled.total = self._final_norm(chunk[-1:]).float()[0]
            return
        part = self._final_norm(chunk).float().sum(0)
        pooled.total = part if pooled.total is None else pooled.total + part

    @staticmethod
    def _finished(pooled: _PooledRow) -> Tensor:
        assert pooled.total is not None, "a prompt has at least one token"
        return pooled.total / pooled.prompt_len if pooled.pooling is Pooling.MEAN else pooled.total
