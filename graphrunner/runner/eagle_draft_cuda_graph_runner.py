"""The whole draft loop of a round, sampling included, in one recording."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.runner.base_draft_runner import BaseDraftRunner, DraftCapture
from graphrunner.runner.eagle_state import EagleState

StepForward = Callable[[ForwardBatch, torch.Tensor, ForwardVariant], tuple[torch.Tensor, torch.Tensor]]
"""(batch of one token a request, hidden [R, C], variant) -> hidden [R, C] and drafts int32 [R]."""


class EagleDraftCudaGraphRunner(BaseDraftRunner):
    """Takes a decode batch (see `draft_batch`), whose rows are in the order that the extend left them in `state`.

    The first draft of a row is there already; each further one is a step over the one before, at the next position. The
    drafts go to `RequestTable.draft_tokens`.

    Args:
        step: one step of the draft.
        state: where the extend left hidden rows and first drafts.
        num_drafts: k, at least 1: k - 1 steps are recorded.
    """

    def __init__(
        self,
        capture: DraftCapture,
        *,
        step: StepForward,
        state: EagleState,
        num_drafts: int,
        name: str = "eagle_draft_cuda_graph_runner",
    ) -> None:
        super().__init__(capture, widths=(1,), name=name)
        self._step, self.state, self._num_drafts = step, state, num_drafts

    def forward_over(self, views: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """Draft, step by step. In graph."""
        num_reqs = views.num_reqs
        # Clones: a step may write into what it is given, and a recording must read the same inputs each time.
        hidden, tokens = self.state.hidden[:num_reqs].clone(), self.state.token_ids[:num_reqs].clone()
        drafts = [tokens]
        for place in range(self._num_drafts - 1):
            self.place_step(views, tokens, place)
            hidden, tokens = self._step(views, hidden, variant)
            drafts.append(tokens)
        self.store_drafts(views.request_rows, drafts)
        return ModelOutput(token_ids=tokens)

    def poison_inputs(self, value: int) -> None:
        """See `BaseDraftRunner.poison_inputs`."""
        self.state.hidden.fill_(float("nan"))
        self.state.token_ids.fill_(value)
