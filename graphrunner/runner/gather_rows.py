"""What a forward reads that the device derives for itself, from the request table. Capturable, no sync.

Plain torch here is the twin of the CUDA kernels in kernels/triton/request_rows.py, which do each half in one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from graphrunner.runner.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class DerivedBuffers:
    """Static outputs of the gather, at fixed addresses.

    Attributes:
        input_ids: int32 [T]; positions: int64 [T]; slot_mapping: int64 [T]; seq_lens: int32 [R].
        draft_tokens: int32 [R, width - 1], -1 where a request has fewer drafts; None for width 1.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    draft_tokens: torch.Tensor | None = None


GatherUniform = Callable[[RequestTable, torch.Tensor, torch.Tensor | None, int, DerivedBuffers], None]
"""(table, request_rows, num_drafts, page_size, out)."""

Advance = Callable[[RequestTable, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(table, request_rows, seq_lens, token_ids)."""

AdvanceAccepted = Callable[[RequestTable, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(table, request_rows, token_ids, num_new)."""

DERIVED_WHY_SAFE = {
    "input_ids": "the dummy row's last token is 0, a valid id",
    "positions": "the dummy row's length is 0, a valid rope index",
    "slot_mapping": "the dummy row's pages are page 0: writes land in a page nobody owns",
    "seq_lens": "the step's width, all of it in page 0",
    "draft_tokens": "no draft at all",
    "page_table": "row 0 is page 0 in every column; columns past a row's pages are page 0 as well",
}
"""What padding rows hold in buffers that nobody loads, and why it is safe. In docs/padding.md."""


def make_derived(num_tokens: int, num_reqs: int, device: torch.device, width: int = 1) -> DerivedBuffers:
    """Fresh buffers of one shape."""
    drafts = torch.full((num_reqs, width - 1), -1, dtype=torch.int32, device=device)
    return DerivedBuffers(
        torch.zeros(num_tokens, dtype=torch.int32, device=device),
        torch.zeros(num_tokens, dtype=torch.int64, device=device),
        torch.zeros(num_tokens, dtype=torch.int64, device=device),
        torch.zeros(num_reqs, dtype=torch.int32, device=device),
        drafts if width > 1 else None,
    )


def gather_uniform(
    table: RequestTable,
    request_rows: torch.Tensor,
    num_drafts: torch.Tensor | None,
    page_size: int,
    out: DerivedBuffers,
) -> None:
    """Everything of a decode or verify step from the row numbers (and draft counts) alone.

    Args:
        request_rows: int32 [R], device; padding is the dummy row.
        num_drafts: int32 [R], device; how many of the rows' drafts count; None for width 1.
    """
    num_reqs = request_rows.shape[0]
    width = 1 if out.draft_tokens is None else out.draft_tokens.shape[1] + 1
    computed = table.num_computed.index_select(0, request_rows)
    last = table.last_token.index_select(0, request_rows)
    torch.add(computed, width, out=out.seq_lens)
    if out.draft_tokens is None or num_drafts is None:
        out.input_ids.copy_(last)
        out.positions.copy_(computed)
        token_rows = request_rows
    else:
        drafts = table.draft_tokens.index_select(0, request_rows)[:, : width - 1]
        places = torch.arange(width - 1, device=request_rows.device)
        out.draft_tokens.copy_(torch.where(places < num_drafts.unsqueeze(1), drafts, -1))
        input_ids = torch.cat((last.unsqueeze(1), out.draft_tokens.clamp(min=0)), dim=1)
        out.input_ids.copy_(input_ids.view(-1))
        offsets = torch.arange(width, device=request_rows.device)
        out.positions.copy_((computed.unsqueeze(1) + offsets).flatten())
        token_rows = request_rows.repeat_interleave(width, output_size=num_reqs * width)
    out.slot_mapping.copy_(slots_of(table, token_rows, out.positions, page_size))


def gather_tokens(
    table: RequestTable,
    input_ids: torch.Tensor,
    token_rows: torch.Tensor,
    *,
    positions: torch.Tensor,
    page_size: int,
    out: DerivedBuffers,
) -> None:
    """Token ids that only the device knows (-1 on the host) and KV slots, for any mix of chunks and decode rows."""
    out.input_ids.copy_(torch.where(input_ids < 0, table.last_token.index_select(0, token_rows), input_ids))
    out.slot_mapping.copy_(slots_of(table, token_rows, positions, page_size))


def slots_of(table: RequestTable, token_rows: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """int64 [T]: page * page_size + offset of each token.

    A position past the last column (a verify row at the context limit) lands in the dummy page, as do the tokens of
    the dummy row.
    """
    columns = positions // page_size
    last = table.page_table.shape[1] - 1
    pages = table.page_table[token_rows.long(), columns.clamp(max=last)].long()
    return torch.where(columns <= last, pages, 0) * page_size + positions % page_size


def advance(table: RequestTable, request_rows: torch.Tensor, seq_lens: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Make the step's tokens the rows' last ones and count the step as computed. int32 [R] each."""
    table.store_lengths(request_rows, seq_lens)
    table.store_tokens(request_rows, token_ids)


def advance_accepted(
    table: RequestTable, request_rows: torch.Tensor, token_ids: torch.Tensor, num_new: torch.Tensor
) -> None:
    """See `RequestTable.store_accepted`."""
    table.store_accepted(request_rows, token_ids, num_new)


def advance_accepted_for(
    device: torch.device, max_reqs: int, width: int, *, is_traced: bool = False
) -> AdvanceAccepted:
    """The fastest `advance_accepted` of a device, for up to `max_reqs` requests of `width` tokens.

    Args:
        is_traced: it must be made of torch's own operators; so in the two below.
    """
    has_kernel = device.type == "cuda" and not is_traced
    return _cuda_advance_accepted(device, max_reqs, width) if has_kernel else advance_accepted


def advance_for(device: torch.device, max_reqs: int, *, is_traced: bool = False) -> Advance:
    """The fastest `advance` of a device, for up to `max_reqs` requests."""
    return _cuda_advance(device, max_reqs) if device.type == "cuda" and not is_traced else advance


def gather_for(device: torch.device, *, is_traced: bool = False) -> GatherUniform:
    """The fastest `gather_uniform` of a device."""
    return _cuda_gather() if device.type == "cuda" and not is_traced else gather_uniform


@cache
def _cuda_gather() -> GatherUniform:
    from graphrunner.kernels.triton import gpu_ops

    def gather(
        table: RequestTable,
        request_rows: torch.Tensor,
        num_drafts: torch.Tensor | None,
        page_size: int,
        out: DerivedBuffers,
    ) -> None:
        inputs = gpu_ops.DecodeInputs(out.input_ids, out.positions, out.seq_lens, out.slot_mapping)
        drafts = None
        if num_drafts is not None and out.draft_tokens is not None:
            drafts = gpu_ops.DraftInputs(table.draft_tokens, num_drafts, out.draft_tokens)
        gpu_ops.gather_decode_inputs(
            request_rows, table.last_token, table.num_computed, table.page_table, page_size, inputs, drafts
        )

    return gather


def _cuda_advance(device: torch.device, max_reqs: int) -> Advance:
    from graphrunner.kernels.triton import gpu_ops

    # The kernel also keeps a ring of recent tokens, for hosts that read a step late; here nobody reads it.
    ring = torch.zeros(1, max_reqs, dtype=torch.int32, device=device)
    counter = torch.zeros(1, dtype=torch.int64, device=device)

    def advance_rows(
        table: RequestTable, request_rows: torch.Tensor, seq_lens: torch.Tensor, token_ids: torch.Tensor
    ) -> None:
        gpu_ops.advance_rows(request_rows, token_ids, table.last_token, table.num_computed, ring, counter)

    return advance_rows


def _cuda_advance_accepted(device: torch.device, max_reqs: int, width: int) -> AdvanceAccepted:
    from graphrunner.kernels.triton import gpu_ops

    ring = torch.zeros(1, max_reqs * width, dtype=torch.int32, device=device)
    counter = torch.zeros(1, dtype=torch.int64, device=device)

    def advance_rows(
        table: RequestTable, request_rows: torch.Tensor, token_ids: torch.Tensor, num_new: torch.Tensor
    ) -> None:
        gpu_ops.advance_rows(request_rows, token_ids, table.last_token, table.num_computed, ring, counter, num_new)

    return advance_rows
