"""Drafts that branch: the longest path that the target agrees with, and the KV of that path alone.

Letters: R requests, W tokens of the tree, the last one before it included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.kernels.tracing import has_gpu_kernels

if TYPE_CHECKING:
    from graphrunner.kernels.triton.tree_rows import RowTable


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """What stands of a tree.

    Attributes:
        token_ids: int32 [R, W]; the drafts of the path, then the token that the target adds; -1 after it.
        num_new: int32 [R]; how many these are.
        order: int64 [R, W]; which token of the step stands at each place: first those of the path, token 0 among them;
            after them the place's own, which counts for nothing.
    """

    token_ids: Tensor
    num_new: Tensor
    order: Tensor


class PathPicker:
    """Accepts drafts that branch, and keeps what their path left. On the GPU that is two launches.

    Args:
        num_levels: of the deepest tree.
        num_tokens: of a request's step, W.
    """

    def __init__(self, num_levels: int, num_tokens: int) -> None:
        self._num_levels, self._num_tokens = num_levels, num_tokens
        # Recordings read them: they stay as long as the model.
        self._row_tables: dict[tuple[int, ...], RowTable] = {}

    def accept(self, draft_tokens: Tensor, target_ids: Tensor, parents: Tensor) -> AcceptedPath:
        """Walk down from the last token as long as some node says what the target says.

        Args:
            draft_tokens: int32 [R, W - 1], -1 where a request has none; siblings differ.
            target_ids: int32 [R * W]; the target's pick after each token of the tree.
            parents: int64 [R, W - 1]; the token that each draft follows.

        In graph: yes. Sync: none.
        """
        if has_gpu_kernels(target_ids):
            from graphrunner.kernels.triton import tree_rows

            return AcceptedPath(*tree_rows.walk(draft_tokens, target_ids, parents))
        return walk(draft_tokens, target_ids, parents, self._num_levels)

    def keep(self, batch: ForwardBatch, order: Tensor, hidden: Tensor | None) -> Tensor | None:
        """Move the KV of the path to the places after the last token, in every layer.

        Args:
            batch: the verify step, whose tokens stored their KV at `slot_mapping`.
            order: see `AcceptedPath`.
            hidden: [R * W, C]; may be overwritten.

        Returns:
            `hidden` as `order` has it. In graph: yes. Sync: none.
        """
        if not has_gpu_kernels(order):
            move_kv(batch, order)
            return None if hidden is None else reordered(hidden, order)
        from graphrunner.kernels.triton import tree_rows

        moved = None if hidden is None else hidden.contiguous()
        tree_rows.move_rows(self._row_table(batch), batch.slot_mapping, order, moved)
        return moved

    def _row_table(self, batch: ForwardBatch) -> RowTable:
        from graphrunner.kernels.triton import tree_rows

        halves = [half for layer in batch.kv_layers for half in (layer.k, layer.v)]
        addresses = tuple(half.data_ptr() for half in halves)
        if addresses not in self._row_tables:
            self._row_tables[addresses] = tree_rows.row_table(halves, batch.slot_mapping.device)
        return self._row_tables[addresses]


def walk(draft_tokens: Tensor, target_ids: Tensor, parents: Tensor, num_levels: int) -> AcceptedPath:
    """See `PathPicker.accept`; level by level, in torch's own operators."""
    num_reqs, width, device = draft_tokens.shape[0], draft_tokens.shape[1] + 1, draft_tokens.device
    target = target_ids.view(num_reqs, width)
    current = torch.zeros(num_reqs, dtype=torch.int64, device=device)
    alive = torch.ones(num_reqs, dtype=torch.bool, device=device)
    order = torch.arange(width, device=device).repeat(num_reqs, 1)
    token_ids = torch.full((num_reqs, width), -1, dtype=torch.int32, device=device)
    num_new = torch.ones(num_reqs, dtype=torch.int32, device=device)
    for depth in range(1, num_levels + 1):
        wanted = target.gather(1, current.unsqueeze(1))
        token_ids[:, depth - 1] = torch.where(alive, wanted[:, 0], -1)
        is_next = (parents == current.unsqueeze(1)) & (draft_tokens == wanted) & (draft_tokens >= 0)
        alive = alive & is_next.any(1)
        current = torch.where(alive, is_next.int().argmax(1) + 1, current)
        order[:, depth] = torch.where(alive, current, depth)
        num_new = num_new + alive.to(torch.int32)
    last = target.gather(1, current.unsqueeze(1))[:, 0]
    token_ids[:, num_levels] = torch.where(alive, last, -1)
    return AcceptedPath(token_ids, num_new, order)


def move_kv(batch: ForwardBatch, order: Tensor) -> None:
    """See `PathPicker.keep`; a layer at a time, in torch's own operators."""
    slots = batch.slot_mapping.view(order.shape)
    sources, places = slots.gather(1, order).flatten(), batch.slot_mapping
    for layer in batch.kv_layers:
        for half in (layer.k, layer.v):
            rows = half.view(-1, half.shape[2] * half.shape[3])
            rows = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
            rows.index_copy_(0, places, rows.index_select(0, sources))


def reordered(rows: Tensor, order: Tensor) -> Tensor:
    """Rows of the step's tokens, [R * W, C], as `order` has them. In graph: yes."""
    num_reqs, width = order.shape
    starts = torch.arange(num_reqs, device=order.device).unsqueeze(1) * width
    return rows.index_select(0, (starts + order).flatten())
