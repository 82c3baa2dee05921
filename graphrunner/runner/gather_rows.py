"""What a forward reads that the device derives for itself, from the request table. Capturable, no sync."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrunner.runner.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class DerivedBuffers:
    """Static outputs of the gather, at fixed addresses.

    Attributes:
        input_ids: int32 [T]; positions: int64 [T]; slot_mapping: int64 [T]; seq_lens: int32 [R].
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor


def make_derived(num_tokens: int, num_reqs: int, device: torch.device) -> DerivedBuffers:
    """Fresh buffers of one shape."""
    return DerivedBuffers(
        torch.zeros(num_tokens, dtype=torch.int32, device=device),
        torch.zeros(num_tokens, dtype=torch.int64, device=device),
        torch.zeros(num_tokens, dtype=torch.int64, device=device),
        torch.zeros(num_reqs, dtype=torch.int32, device=device),
    )


def gather_decode(table: RequestTable, request_rows: torch.Tensor, page_size: int, out: DerivedBuffers) -> None:
    """Everything of a decode step (one query token a row) from the row numbers alone.

    Args:
        request_rows: int32 [R], device; padding is the dummy row.
    """
    computed = table.num_computed.index_select(0, request_rows)
    out.input_ids.copy_(table.last_token.index_select(0, request_rows))
    out.positions.copy_(computed)
    out.seq_lens.copy_(computed + 1)
    out.slot_mapping.copy_(slots_of(table, request_rows, out.positions, page_size))


def gather_tokens(
    table: RequestTable, input_ids: torch.Tensor, token_rows: torch.Tensor, positions: torch.Tensor, page_size: int,
    out: DerivedBuffers,
) -> None:  # fmt: skip
    """Token ids that only the device knows (-1 on the host) and KV slots, for any mix of chunks and decode rows."""
    out.input_ids.copy_(torch.where(input_ids < 0, table.last_token.index_select(0, token_rows), input_ids))
    out.slot_mapping.copy_(slots_of(table, token_rows, positions, page_size))


def slots_of(table: RequestTable, token_rows: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """int64 [T]: page * page_size + offset of each token; tokens of the dummy row land in the dummy page."""
    pages = table.page_table[token_rows.long(), positions // page_size].long()
    return pages * page_size + positions % page_size
