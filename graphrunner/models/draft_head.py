"""From a draft's hidden rows to token ids of the target: norm, head, reduced vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from graphrunner.core.errors import ModelLoadError
from graphrunner.kernels.packed_weight import Weight, dense_weight, dequantize
from graphrunner.layers import ops
from graphrunner.layers.linear import PackedLinear, Part
from graphrunner.layers.loading import WeightSlot
from graphrunner.layers.norm import RMSNorm
from graphrunner.layers.options import LayerOptions


class DraftVocabulary(nn.Module):
    """Which tokens a draft can say.

    Args:
        size: W, how many.
        target_size: V of the target.
        device: where the table lives.

    Attributes:
        target_ids: int32 [W], device: the target's id of each draft id, the same id unless a checkpoint says otherwise.
    """

    target_ids: Tensor

    def __init__(self, size: int, target_size: int, device: torch.device) -> None:
        super().__init__()
        self._target_size = target_size
        self._is_same = True
        self.register_buffer("target_ids", torch.arange(size, dtype=torch.int32, device=device))

    @property
    def is_reduced(self) -> bool:
        """Whether some tokens of the target cannot be drafted."""
        return len(self.target_ids) < self._target_size

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """int32 target ids of int draft ids, of any shape. In graph: yes."""
        draft_ids = draft_ids.clamp(0, len(self.target_ids) - 1)  # in a rehearsal no kernel wrote them
        return draft_ids.to(torch.int32) if self._is_same else self.target_ids[draft_ids]

    def slot(self, name: str) -> WeightSlot:
        """The checkpoint's table: target id minus draft id, int [W]."""
        return WeightSlot(name, tuple(self.target_ids.shape), self._put)

    def _put(self, offsets: Tensor) -> None:
        ids = torch.arange(len(self.target_ids), device=offsets.device) + offsets.long()
        if int(ids.min()) < 0 or int(ids.max()) >= self._target_size:
            raise ModelLoadError(f"d2t leads to token {int(ids.max())}, the target has {self._target_size}")
        self.target_ids.copy_(ids.to(torch.int32))
        self._is_same = False


class DraftHead(nn.Module):
    """Norm and projection onto the draft vocabulary: [rows, hidden_size] -> float32 [rows, W].

    Args:
        norm: None for drafts whose output is normed already (EAGLE-1).
        own: the head's name in the checkpoint; None when the target's is used.
    """

    packed: Weight

    def __init__(
        self,
        norm: RMSNorm | None,
        vocabulary: DraftVocabulary,
        *,
        own: str | None,
        hidden_size: int,
        options: LayerOptions,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.vocabulary = vocabulary
        self.proj = None
        if own is not None:
            size = len(vocabulary.target_ids)
            self.proj = PackedLinear((Part(own, size),), hidden_size, False, options)

    def weight_slots(self) -> Iterator[WeightSlot]:
        if self.norm is not None:
            yield from self.norm.weight_slots()
        if self.proj is not None:
            yield from self.proj.weight_slots()

    def finish_load(self, target_head: Weight) -> None:
        """Take the loaded matrix, or the target's: its very memory, or a copy of the rows that can be drafted."""
        if self.proj is not None:
            self.packed = self.proj.packed
        elif self.vocabulary.is_reduced:
            dense = target_head if target_head.is_dense else dense_weight(dequantize(target_head))
            self.packed = dense_weight(dense.data[self.vocabulary.target_ids.long()])
        else:
            self.packed = target_head

    def forward(self, rows: Tensor) -> Tensor:
        return self.scores(rows).float()

    def scores(self, rows: Tensor) -> Tensor:
        """As `forward`, in the dtype of the rows."""
        weight, eps = (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)
        return ops.norm_linear(rows, weight, eps, self.packed, None)

    def greedy(self, rows: Tensor) -> Tensor:
        """The likeliest draft of each row as a token of the target: int32 [rows]."""
        weight, eps = (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)
        best = ops.norm_linear_argmax(rows, weight, eps, self.packed, self.vocabulary.target_ids)
        return self.vocabulary.to_target(self.forward(rows).argmax(-1)) if best is None else best
