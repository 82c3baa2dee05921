"""Rows that persist between steps: the device half of every running request."""

from __future__ import annotations

import math

import numpy as np
import torch

from graphrunner.core.scheduled_batch import PageAppend, RowInit, ScheduledBatch
from graphrunner.device.registry import device_of
from graphrunner.runner.staging import StagingBlock

_INT_BYTES, _INDEX_BYTES = 4, 8
_MIN_CELLS_POWER = 3


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
        self._cells = self.page_table.view(-1)
        self._staging: _Staged | None = None
        self._draft_staging: _Staged | None = None
        self._draft_rows = self.draft_tokens.view(torch.uint8).unbind() if max_drafts else ()
        self._host_drafts = self.draft_tokens.numpy() if device.type == "cpu" else None

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
        # Clamped for a rehearsal, where nobody wrote the counts.
        last = token_ids.gather(1, (num_new.long() - 1).clamp(0, token_ids.shape[1] - 1).unsqueeze(1))[:, 0]
        self.store_tokens(request_rows, last)
        computed = self.num_computed.index_select(0, rows) + num_new
        self.num_computed.index_copy_(0, rows, torch.where(is_real, computed, 0))

    def _write_drafts(self, batch: ScheduledBatch) -> None:
        width = self.draft_tokens.shape[1]
        padded = [
            token_ids if len(token_ids) == width else (*token_ids, *(-1,) * (width - len(token_ids)))
            for token_ids in batch.draft_token_ids
        ]
        if not self._is_remote:
            assert self._host_drafts is not None
            for row, token_ids in zip(batch.rows, padded, strict=True):
                self._host_drafts[row] = token_ids
            return
        num_reqs, rows_end = batch.num_reqs, batch.num_reqs * _INDEX_BYTES
        if self._draft_staging is None:
            self._draft_staging = _Staged(self.max_num_seqs * (_INDEX_BYTES + width * _INT_BYTES), self._device)
        staged = self._draft_staging
        turn = staged.begin()
        if num_reqs == 1:  # straight to its row: a call less
            staged.host_ints[turn][:width] = padded[0]
            staged.send_to(self._draft_rows[batch.rows[0]])
            return
        host = staged.host_views[turn]
        host[:rows_end].view(np.int64)[:] = batch.rows
        drafts = host[rows_end : rows_end + num_reqs * width * _INT_BYTES].view(np.int32).reshape(num_reqs, width)
        drafts[:] = padded
        staged.send(rows_end + drafts.nbytes)
        rows, values = staged.indexed(num_reqs, width)
        self.draft_tokens.index_copy_(0, rows, values)

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
        """One packed copy: flat cells and pages of the appends; rows, lengths and page rows of the inits."""
        num_inits, num_cells = len(inits), sum(len(append.pages) for append in appends)
        num_cells = 1 << max(_MIN_CELLS_POWER, (num_cells - 1).bit_length()) if num_cells else 0
        sizes = (num_cells * _INDEX_BYTES, num_cells * _INT_BYTES, num_inits * _INDEX_BYTES, num_inits * _INT_BYTES)
        ends = np.cumsum((*sizes, num_inits * self.max_pages * _INT_BYTES)).tolist()
        if self._staging is None or self._staging.num_bytes < ends[-1]:
            # An outgrown one may still be read by the device: the allocator keeps it.
            self._staging = _Staged(1 << max(12, (ends[-1] - 1).bit_length()), self._device)
        staged = self._staging
        host = staged.host_views[staged.begin()]
        if appends:
            _fill_cells(host[: ends[0]].view(np.int64), host[ends[0] : ends[1]].view(np.int32), appends, self.max_pages)
        if inits:
            host[ends[1] : ends[2]].view(np.int64)[:] = [init.row for init in inits]
            host[ends[2] : ends[3]].view(np.int32)[:] = [cached[init.row] for init in inits]
            page_rows = host[ends[3] : ends[4]].view(np.int32).reshape(num_inits, self.max_pages)
            page_rows[:] = 0
            for place, init in enumerate(inits):
                page_rows[place, : len(init.pages)] = init.pages
        staged.send(ends[-1])
        if inits:
            block = staged.block
            rows, lengths = block[ends[1] : ends[2]].view(torch.int64), block[ends[2] : ends[3]].view(torch.int32)
            self.num_computed.index_copy_(0, rows, lengths)
            pages = block[ends[3] : ends[4]].view(torch.int32).view(num_inits, self.max_pages)
            self.page_table.index_copy_(0, rows, pages)
        if appends:
            cells, values = staged.indexed(num_cells)
            self._cells.index_copy_(0, cells, values)


class _Staged(StagingBlock):
    """A block that begins with int64 indices and the int32 values that belong there.

    Attributes:
        host_ints: `host_views` as int32.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(num_bytes, device)
        self.host_ints: list[np.ndarray] = [view.view(np.int32) for view in self.host_views]
        self.num_bytes = num_bytes
        self._indexed: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def indexed(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(indices int64 [n], values int32 [n, ...]) of a shape, device. Made once: a view costs the host a call."""
        views = self._indexed.get(shape)
        if views is None:
            end = shape[0] * _INDEX_BYTES
            values = self.block[end : end + math.prod(shape) * _INT_BYTES].view(torch.int32).view(shape)
            views = self._indexed[shape] = (self.block[:end].view(torch.int64), values)
        return views


def _fill_cells(cells: np.ndarray, pages: np.ndarray, appends: tuple[PageAppend, ...], max_pages: int) -> None:
    """Flat places in the page table, and what goes there. Padding is the dummy row's first page, which is page 0."""
    cells[:], pages[:] = 0, 0
    place = 0
    for append in appends:
        end, start = place + len(append.pages), append.row * max_pages + append.start
        cells[place:end] = range(start, start + len(append.pages))
        pages[place:end] = append.pages
        place = end
