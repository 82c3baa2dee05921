"""Drafts that branch: the longest path that the target agrees with, and the KV of that path alone.

Letters: R requests, W tokens of the tree, the last one before it included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphrunner.core.forward_batch import ForwardBatch


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
    """Accepts drafts that branch.

    Args:
        num_levels: of the deepest tree.
        num_tokens: of a request's step, W.
    """

    def __init__(self, num_levels: int, num_tokens: int) -> None:
        self._num_levels, self._num_tokens = num_levels, num_tokens

    def accept(self, draft_tokens: Tensor, target_ids: Tensor, parents: Tensor) -> AcceptedPath:
        """Walk down from the last token as long as some node says what the target says.

        Args:
            draft_tokens: int32 [R, W - 1], -1 where a request has none; siblings differ.
            target_ids: int32 [R * W]; the target's pick after each token of the tree.
            parents: int64 [R, W - 1]; the token that each draft follows.

        In graph: yes. Sync: none.
        """
        num_reqs, width, device = draft_tokens.shape[0], self._num_tokens, draft_tokens.device
        target = target_ids.view(num_reqs, width)
        current = torch.zeros(num_reqs, dtype=torch.int64, device=device)
        alive = torch.ones(num_reqs, dtype=torch.bool, device=device)
        order = torch.arange(width, device=device).repeat(num_reqs, 1)
        token_ids = torch.full((num_reqs, width), -1, dtype=torch.int32, device=device)
        num_new = torch.ones(num_reqs, dtype=torch.int32, device=device)
        for depth in range(1, self._num_levels + 1):
            wanted = target.gather(1, current.unsqueeze(1))
            token_ids[:, depth - 1] = torch.where(alive, wanted[:, 0], -1)
            is_next = (parents == current.unsqueeze(1)) & (draft_tokens == wanted) & (draft_tokens >= 0)
            alive = alive & is_next.any(1)
            current = torch.where(alive, is_next.int().argmax(1) + 1, current)
            order[:, depth] = torch.where(alive, current, depth)
            num_new = num_new + alive.to(torch.int32)
        last = target.gather(1, current.unsqueeze(1))[:, 0]
        token_ids[:, self._num_levels] = torch.where(alive, last, -1)
        return AcceptedPath(token_ids, num_new, order)


def keep_path(batch: ForwardBatch, order: Tensor) -> None:
    """Move the KV of the path to the places after the last token; in every layer. In graph: yes.

    Args:
        batch: the verify step, whose tokens stored their KV at `slot_mapping`.
        order: see `AcceptedPath`.
    """
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
