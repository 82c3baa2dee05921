"""Rows that persist between steps: the device half of every running request."""

from __future__ import annotations

import numpy as np
import torch

from graphrunner.core.scheduled_batch import PageAppend, RowInit, ScheduledBatch
from graphrunner.device.registry import device_of
from graphrunner.runner.staging import StagingBlock

_INT_BYTES = 4


class RequestTable:
    """Last token, computed length and pages of each row; row 0 is the dummy and stays zero.

    Args:
        num_rows: max_num_seqs + 1.
        max_pages: columns, enough for the context limit and the draft tokens past it.
        device: where it lives.
        max_drafts: draft tokens a row; 0 without speculation.

    Attributes:
        last_token: int32 [num_rows], device; the newest token, whose KV is not written yet.
        num_computed: int32 [num_rows], device; tokens whose KV exists.
        page_table: int32 [num_rows, max_pages], device; page 0 where a row owns no page.
        draft_tokens: int32 [num_rows, max_drafts], device; what comes after the last token, as far as somebody guessed
            it; -1 from where nobody did. Good for the next VERIFY step only.
        draft_parents: int32 [num_rows, max_drafts], device; of drafts that branch as each round finds best: the token
            of the VERIFY step that each follows, 0 the last token. Always an earlier one.
    """

    def __init__(self, num_rows: int, max_pages: int, device: torch.device, max_drafts: int = 0) -> None:
        self.last_token = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.num_computed = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(num_rows, max_pages, dtype=torch.int32, device=device)
        self.draft_tokens = torch.full((num_rows, max_drafts), -1, dtype=torch.int32, device=device)
        self.draft_parents = torch.arange(max_drafts, dtype=torch.int32, device=device).repeat(num_rows, 1)
        self.max_pages = max_pages
        self._device = device
        self._is_remote = device_of(device).has_own_memory
        self._staging: StagingBlock | None = None
        self._draft_staging: StagingBlock | None = None

    @property
    def max_num_seqs(self) -> int:
        """Rows that requests can have."""
        return self.last_token.shape[0] - 1

    def apply(self, batch: ScheduledBatch) -> None:
        """Take in the step's new rows, new pages and host-made drafts. No work in a steady step. Sync: none.

        A row may have a new owner while a launched step still writes into it: the device runs both in order.
        """
        if batch.draft_token_ids:
            self._write_drafts(batch)
        if not batch.row_inits and not batch.page_appends:
            return
        cached = dict(zip(batch.rows, batch.cached_lens, strict=True)) if batch.row_inits else {}
        if self._is_remote:
            self._send(batch.row_inits, batch.page_appends, cached)
        else:
            self._write(batch.row_inits, batch.page_appends, cached)

    def store_lengths(self, request_rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Record that the rows' KV now reaches `seq_lens`. In graph: yes."""
        self.num_computed.index_copy_(0, request_rows.long(), torch.where(request_rows > 0, seq_lens, 0))

    def store_tokens(self, request_rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Record the rows' newest tokens. In graph: yes."""
        tokens = torch.where(request_rows > 0, token_ids, 0).to(torch.int32)
        self.last_token.index_copy_(0, request_rows.long(), tokens)

    def store_accepted(self, request_rows: torch.Tensor, token_ids: torch.Tensor, num_new: torch.Tensor) -> None:
        """Move rows on by what a VERIFY step kept. In graph: yes.

        Args:
            request_rows: int32 [R].
            token_ids: int32 [R, W]; num_new: int32 [R], 1 to W: how many of them there are.
        """
        rows, is_real = request_rows.long(), request_rows > 0
        last = token_ids.gather(1, (num_new.long() - 1).unsqueeze(1))[:, 0]
        self.store_tokens(request_rows, last)
        computed = self.num_computed.index_select(0, rows) + num_new
        self.num_computed.index_copy_(0, rows, torch.where(is_real, computed, 0))

    def _write_drafts(self, batch: ScheduledBatch) -> None:
        width = self.draft_tokens.shape[1]
        if not self._is_remote:
            drafts = self.draft_tokens.numpy()
            for row, token_ids in zip(batch.rows, batch.draft_token_ids, strict=True):
                drafts[row, : len(token_ids)] = token_ids
                drafts[row, len(token_ids) :] = -1
            return
        num_bytes = batch.num_reqs * (1 + width) * _INT_BYTES
        staging = self._draft_staging = _large_enough(self._draft_staging, num_bytes, self._device)
        host = staging.host_views[staging.begin()].view(np.int32)
        host[: batch.num_reqs] = batch.rows
        drafts = host[batch.num_reqs : batch.num_reqs * (1 + width)].reshape(batch.num_reqs, width)
        drafts[:] = [(*token_ids, *(-1,) * (width - len(token_ids))) for token_ids in batch.draft_token_ids]
        staging.send(num_bytes)
        sent = staging.block.view(torch.int32)
        rows, values = sent[: batch.num_reqs], sent[batch.num_reqs : batch.num_reqs * (1 + width)]
        self.draft_tokens.index_copy_(0, rows.long(), values.view(batch.num_reqs, width))

    def _write(self, inits: tuple[RowInit, ...], appends: tuple[PageAppend, ...], cached: dict[int, int]) -> None:
        """Put everything in place through the host's own view of the memory."""
        pages, computed = self.page_table.numpy(), self.num_computed.numpy()
        for init in inits:
            pages[init.row] = 0
            pages[init.row, : len(init.pages)] = init.pages
            computed[init.row] = cached[init.row]
        for append in appends:
            pages[append.row, append.start : append.start + len(append.pages)] = append.pages

    def _send(self, inits: tuple[RowInit, ...], appends: tuple[PageAppend, ...], cached: dict[int, int]) -> None:
        """One packed copy: rows, lengths and page rows of the inits; flat cells and pages of the appends."""
        num_inits, num_cells = len(inits), sum(len(append.pages) for append in appends)
        ends = np.cumsum((num_inits, num_inits, num_inits * self.max_pages, num_cells, num_cells)).tolist()
        staging = self._staging = _large_enough(self._staging, ends[-1] * _INT_BYTES, self._device)
        host = staging.host_views[staging.begin()].view(np.int32)
        host[: ends[0]] = [init.row for init in inits]
        host[ends[0] : ends[1]] = [cached[init.row] for init in inits]
        page_rows = host[ends[1] : ends[2]].reshape(num_inits, self.max_pages)
        page_rows[:] = 0
        for place, init in enumerate(inits):
            page_rows[place, : len(init.pages)] = init.pages
        cells = [append.row * self.max_pages + append.start + i for append in appends for i in range(len(append.pages))]
        host[ends[2] : ends[3]] = cells
        host[ends[3] : ends[4]] = [page for append in appends for page in append.pages]
        staging.send(ends[-1] * _INT_BYTES)
        sent = staging.block.view(torch.int32)
        if inits:
            rows = sent[: ends[0]].long()
            self.num_computed.index_copy_(0, rows, sent[ends[0] : ends[1]])
            self.page_table.index_copy_(0, rows, sent[ends[1] : ends[2]].view(num_inits, self.max_pages))
        if appends:
            self.page_table.view(-1).index_copy_(0, sent[ends[2] : ends[3]].long(), sent[ends[3] : ends[4]])


def _large_enough(staging: StagingBlock | None, num_bytes: int, device: torch.device) -> StagingBlock:
    """A block that holds `num_bytes`. An outgrown one may still be read by the device: the allocator keeps it."""
    if staging is None or staging.block.numel() < num_bytes:
        return StagingBlock(1 << max(12, (num_bytes - 1).bit_length()), device)
    return staging
