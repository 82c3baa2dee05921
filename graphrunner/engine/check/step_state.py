"""What a step changes on the device, so that it can be run twice and count once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.core.shape_key import ForwardMode
from graphrunner.runner.gather_rows import slots_of
from graphrunner.runner.runner_context import RunnerContext
from graphrunner.runner.static_buffers import token_columns


@dataclass(frozen=True, slots=True)
class StepState:
    """Rows and KV at one moment.

    Attributes:
        last_token, num_computed: int32 [num_rows], device; copies.
        kv: of each layer, keys and values at the step's slots: [num_tokens, heads, head_dim]; copies.
    """

    last_token: Tensor
    num_computed: Tensor
    kv: tuple[tuple[Tensor, Tensor], ...]


class StepStates:
    """Takes and puts back the states of one step.

    Args:
        context: whose table and pages.
        batch: the step; the table has taken in its rows and pages.
    """

    def __init__(self, context: RunnerContext, batch: ScheduledBatch) -> None:
        self._context = context
        columns, counting = token_columns(batch), counting_tokens(batch)
        device = context.device
        rows = torch.from_numpy(columns["token_rows"][counting].astype(np.int64)).to(device)
        positions = torch.from_numpy(columns["positions"][counting].astype(np.int64)).to(device)
        slots = slots_of(context.table, rows, positions, context.page_size)
        # Padding writes the dummy page, too, so what it holds says nothing about the step.
        self._slots = slots[slots >= context.page_size]

    def take(self) -> StepState:
        """Copy what is there now."""
        table = self._context.table
        kv = tuple(
            (_slots_view(layer.k)[self._slots], _slots_view(layer.v)[self._slots]) for layer in self._context.kv_layers
        )
        return StepState(table.last_token.clone(), table.num_computed.clone(), kv)

    def put(self, state: StepState) -> None:
        """Make a state the present one."""
        table = self._context.table
        table.last_token.copy_(state.last_token)
        table.num_computed.copy_(state.num_computed)
        for layer, (k, v) in zip(self._context.kv_layers, state.kv, strict=True):
            _slots_view(layer.k)[self._slots] = k
            _slots_view(layer.v)[self._slots] = v


def counting_tokens(batch: ScheduledBatch) -> list[int]:
    """Places of the step's tokens that somebody reads: of a verify step, not the drafts that a request lacks."""
    if batch.mode is not ForwardMode.VERIFY:
        return list(range(batch.num_tokens))
    width = batch.max_query_len
    return [row * width + place for row, count in enumerate(batch.num_draft_tokens) for place in range(count + 1)]


def _slots_view(pages: Tensor) -> Tensor:
    """[num_pages, page_size, ...] as [num_slots, ...]; 8-bit floats as bytes, which every device can index."""
    flat = pages.view(-1, *pages.shape[2:])
    return flat.view(torch.uint8) if pages.dtype.itemsize == 1 else flat
