"""The k steps of a separate draft model in one recording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardMode, ForwardVariant
from graphrunner.runner.base_draft_runner import BaseDraftRunner, DraftCapture
from graphrunner.runner.prepared import with_metadata
from graphrunner.runner.round_inputs import NewestInputs

DraftStep = Callable[[ForwardBatch, ForwardVariant], torch.Tensor]
"""A uniform batch of one or two tokens a request, and the variant -> the token after each request's last, int32 [R]."""


class DraftModelCudaGraphRunner(BaseDraftRunner):
    """Takes a decode batch (see `draft_batch`). The drafts go to `RequestTable.draft_tokens`.

    The first step computes the newest token and the one before it: when all drafts of the round before stood, the last
    of them was never fed to the draft, and its KV is missing. Each further step computes the draft before.

    Args:
        step: one forward of the draft, with the pick after it.
        inputs: what the target's step left, shared by the runners of all k.
        num_drafts: k, at least 1.
    """

    def __init__(
        self,
        capture: DraftCapture,
        *,
        step: DraftStep,
        inputs: NewestInputs,
        num_drafts: int,
    ) -> None:
        name = f"draft_model_{num_drafts}"
        super().__init__(capture, widths=(1,), width_inside=2, name=name)
        self._step, self._inputs, self._num_drafts = step, inputs, num_drafts
        self._ends = torch.arange(self.max_reqs, dtype=torch.int64, device=capture.context.device) * 2 + 1

    def forward_over(self, views: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """Draft, step by step. In graph."""
        num_reqs, table = views.num_reqs, self.context.table
        last = table.last_token.index_select(0, views.request_rows)
        self.place_step(views, torch.stack((self._inputs.before_last[:num_reqs], last), dim=1).flatten(), -1)
        views.logits_indices.copy_(self._ends[:num_reqs])
        drafts = [self._step(views, variant)]
        single = self._single(views)
        for place in range(1, self._num_drafts):
            self.place_step(single, drafts[-1], place)
            drafts.append(self._step(single, variant))
        self.store_drafts(views.request_rows, drafts)
        return ModelOutput(token_ids=drafts[-1])

    def poison_inputs(self, value: int) -> None:
        """See `BaseDraftRunner.poison_inputs`."""
        self._inputs.before_last.fill_(value)

    def _single(self, views: ForwardBatch) -> ForwardBatch:
        """Views of one token a request over the same buffers."""
        num_reqs = views.num_reqs
        single = replace(
            views,
            mode=ForwardMode.DECODE,
            input_ids=views.input_ids[:num_reqs],
            positions=views.positions[:num_reqs],
            slot_mapping=views.slot_mapping[:num_reqs],
            query_start_loc=self._starts[1, : num_reqs + 1],
            num_tokens=num_reqs,
            max_query_len=1,
        )
        return with_metadata(single)
