"""Rows that persist between steps: the device half of every running request."""

from __future__ import annotations

import torch

from graphrunner.core.scheduled_batch import ScheduledBatch


class RequestTable:
    """Last token, computed length and pages of each row; row 0 is the dummy and stays zero.

    Args:
        num_rows: max_num_seqs + 1.
        max_pages: columns, enough for the context limit.
        device: where it lives.

    Attributes:
        last_token: int32 [num_rows], device.
        num_computed: int32 [num_rows], device; tokens whose KV exists.
        page_table: int32 [num_rows, max_pages], device; page 0 where a row owns no page.
    """

    def __init__(self, num_rows: int, max_pages: int, device: torch.device) -> None:
        self.last_token = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.num_computed = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(num_rows, max_pages, dtype=torch.int32, device=device)
        self._device = device

    def apply(self, batch: ScheduledBatch) -> None:
        """Take in the step's new rows, then its new pages. No work in a steady step. Sync: none.

        A row may have a new owner while a launched step still writes into it: the device runs both in order.
        """
        if batch.row_inits:
            cached = dict(zip(batch.rows, batch.cached_lens, strict=True))
            for init in batch.row_inits:
                self.page_table[init.row].zero_()
                self._put_pages(init.row, 0, init.pages)
                self.num_computed[init.row] = cached.get(init.row, 0)
        for append in batch.page_appends:
            self._put_pages(append.row, append.start, append.pages)

    def store_lengths(self, request_rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Record that the rows' KV now reaches `seq_lens`. In graph: yes."""
        self.num_computed.index_copy_(0, request_rows.long(), torch.where(request_rows > 0, seq_lens, 0))

    def store_tokens(self, request_rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Record the rows' newest tokens. In graph: yes."""
        self.last_token.index_copy_(0, request_rows.long(), torch.where(request_rows > 0, token_ids.to(torch.int32), 0))

    def _put_pages(self, row: int, start: int, pages: tuple[int, ...]) -> None:
        if pages:
            values = torch.tensor(pages, dtype=torch.int32)
            self.page_table[row, start : start + len(pages)].copy_(values, non_blocking=True)
