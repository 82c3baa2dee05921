"""All drafts of a head that reads the target's KV and has none of its own, in one recording."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.runner.base_draft_runner import BaseDraftRunner, DraftCapture
from graphrunner.runner.round_inputs import RoundInputs

FrozenForward = Callable[[int, ForwardBatch, torch.Tensor, ForwardVariant], tuple[torch.Tensor, torch.Tensor]]
"""(step, batch of one token a request, hidden [R, C], variant) -> hidden [R, C] and drafts int32 [R]. Step 0 is given
the target's hidden states, later ones what the step before returned."""


class FrozenKVMTPCudaGraphRunner(BaseDraftRunner):
    """Every step sees the keys up to the newest computed token; nothing is written but the drafts.

    Args:
        capture: with the target's own KV layers.
        step: one step of the head.
        inputs: where the round is copied to before each run; its token ids are not read.
        query_width: tokens a request of the target's step.
        num_drafts: k.
    """

    def __init__(
        self,
        capture: DraftCapture,
        *,
        step: FrozenForward,
        inputs: RoundInputs,
        query_width: int,
        num_drafts: int,
        name: str = "frozen_kv_mtp_cuda_graph_runner",
    ) -> None:
        super().__init__(capture, widths=(query_width,), width_inside=1, name=name)
        self._step, self.inputs = step, inputs
        self._query_width, self._num_drafts = query_width, num_drafts

    def forward_over(self, views: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """Draft, step by step. In graph."""
        num_reqs, width, table = views.num_reqs, self._query_width, self.context.table
        counts = self.inputs.num_new[:num_reqs].clamp(1, width)
        newest = torch.arange(num_reqs, device=counts.device) * width + counts - 1
        hidden = self.inputs.hidden.index_select(0, newest)
        tokens = table.last_token.index_select(0, views.request_rows)
        drafts = []
        for index in range(self._num_drafts):
            # Keys, length and slot stay those of the newest computed token; the rotation goes on.
            self.place_step(views, tokens, -1)
            views.positions.add_(index)
            hidden, tokens = self._step(index, views, hidden, variant)
            drafts.append(tokens)
        self.store_drafts(views.request_rows, drafts)
        return ModelOutput(token_ids=tokens)

    def poison_inputs(self, value: int) -> None:
        """See `BaseDraftRunner.poison_inputs`."""
        self.inputs.poison(value)
