"""Where a draft step's tokens stand, and where its drafts go: derived on the device from the request table.

The rows have moved on already: `num_computed` of a row is where its newest token, not computed yet, will stand.
Plain torch here is the twin of the CUDA kernels in kernels/triton/draft_rows.py, one launch each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.runner.gather_rows import slots_of
from graphrunner.runner.request_table import RequestTable

PlaceStep = Callable[[RequestTable, ForwardBatch, torch.Tensor, int, int, int], None]
"""(table, views, tokens, shift, page_size, max_token_id)."""

PlaceRound = Callable[[RequestTable, ForwardBatch, torch.Tensor, torch.Tensor, int, int], None]
"""(table, views, tokens, num_new, page_size, max_token_id)."""

StoreDrafts = Callable[[RequestTable, torch.Tensor, torch.Tensor], None]
"""(table, request_rows, drafts)."""


def place_step(
    table: RequestTable, views: ForwardBatch, tokens: torch.Tensor, shift: int, page_size: int, max_token_id: int
) -> None:
    """One token a row, `shift` places after the newest one. In graph.

    Args:
        views: whose input ids, positions, slots and lengths are filled.
        tokens: int32 [R]; a valid id is read also where there is none.
    """
    lengths = table.num_computed.index_select(0, views.request_rows)
    _place(table, views, (lengths + shift).clamp(min=0), tokens, page_size, max_token_id)


def place_round(
    table: RequestTable,
    views: ForwardBatch,
    tokens: torch.Tensor,
    num_new: torch.Tensor,
    page_size: int,
    max_token_id: int,
) -> None:
    """The tokens of the step that the rows just took, and each row's newest one in `views.logits_indices`. In graph.

    Args:
        tokens: int32 [T], the token after each of the step's; num_new: int32 [R], how far each row moved.
    """
    width = views.num_tokens // views.num_reqs
    counts = torch.where(views.request_rows > 0, num_new.clamp(1, width), 1)
    lengths = table.num_computed.index_select(0, views.request_rows)
    _place(table, views, (lengths - counts).clamp(min=0), tokens, page_size, max_token_id)
    views.logits_indices.copy_(torch.arange(views.num_reqs, device=counts.device) * width + counts - 1)


def store_drafts(table: RequestTable, request_rows: torch.Tensor, drafts: torch.Tensor) -> None:
    """Leave int32 [R, k] drafts in the rows; nothing stands after them. In graph."""
    made = drafts.new_full((drafts.shape[0], table.draft_tokens.shape[1]), -1)
    made[:, : drafts.shape[1]] = torch.where((request_rows > 0).unsqueeze(1), drafts, -1)
    table.draft_tokens.index_copy_(0, request_rows.long(), made)


def place_step_for(device: torch.device, *, is_traced: bool = False) -> PlaceStep:
    """The fastest `place_step` of a device.

    Args:
        is_traced: it must be made of torch's own operators; so in the two below.
    """
    return _cuda_kernels()[0] if device.type == "cuda" and not is_traced else place_step


def place_round_for(device: torch.device, *, is_traced: bool = False) -> PlaceRound:
    """The fastest `place_round` of a device."""
    return _cuda_kernels()[1] if device.type == "cuda" and not is_traced else place_round


def store_drafts_for(device: torch.device, *, is_traced: bool = False) -> StoreDrafts:
    """The fastest `store_drafts` of a device."""
    return _cuda_kernels()[2] if device.type == "cuda" and not is_traced else store_drafts


def _place(
    table: RequestTable,
    views: ForwardBatch,
    first: torch.Tensor,
    tokens: torch.Tensor,
    page_size: int,
    max_token_id: int,
) -> None:
    num_reqs, width = views.num_reqs, views.num_tokens // views.num_reqs
    views.positions.copy_((first.unsqueeze(1) + torch.arange(width, device=first.device)).flatten())
    views.seq_lens.copy_(first + width)
    token_rows = views.request_rows.repeat_interleave(width, output_size=num_reqs * width)
    views.slot_mapping.copy_(slots_of(table, token_rows, views.positions, page_size))
    views.input_ids.copy_(torch.where(token_rows > 0, tokens[: views.num_tokens].clamp(0, max_token_id), 0))


@cache
def _cuda_kernels() -> tuple[PlaceStep, PlaceRound, StoreDrafts]:
    from graphrunner.kernels.triton import draft_rows
    from graphrunner.kernels.triton.request_rows import DecodeInputs

    def inputs_of(views: ForwardBatch) -> DecodeInputs:
        return DecodeInputs(views.input_ids, views.positions, views.seq_lens, views.slot_mapping)

    def step(
        table: RequestTable, views: ForwardBatch, tokens: torch.Tensor, shift: int, page_size: int, max_token_id: int
    ) -> None:
        draft_rows.place_tokens(
            views.request_rows,
            table.num_computed,
            table.page_table,
            tokens=tokens,
            page_size=page_size,
            max_token_id=max_token_id,
            out=inputs_of(views),
            shift=shift,
        )

    def round_(
        table: RequestTable,
        views: ForwardBatch,
        tokens: torch.Tensor,
        num_new: torch.Tensor,
        page_size: int,
        max_token_id: int,
    ) -> None:
        draft_rows.place_tokens(
            views.request_rows,
            table.num_computed,
            table.page_table,
            tokens=tokens,
            page_size=page_size,
            max_token_id=max_token_id,
            out=inputs_of(views),
            num_new=num_new,
            last=views.logits_indices,
        )

    def store(table: RequestTable, request_rows: torch.Tensor, drafts: torch.Tensor) -> None:
        draft_rows.store_drafts(request_rows, drafts, table.draft_tokens)

    return step, round_, store
