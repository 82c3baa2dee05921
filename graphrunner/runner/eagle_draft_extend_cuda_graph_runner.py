"""The draft takes in what the target's step computed, and makes its first draft of each row: one recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.runner.base_draft_runner import BaseDraftRunner, DraftCapture
from graphrunner.runner.eagle_state import EagleState
from graphrunner.runner.round_inputs import RoundInputs

ExtendForward = Callable[[ForwardBatch, torch.Tensor, ForwardVariant], tuple[torch.Tensor, torch.Tensor]]
"""(batch, hidden states of the target [T, H], variant) -> hidden [R, C] and drafts int32 [R] of the rows at
`batch.logits_indices`; `batch.input_ids` are the tokens after each position. The head sees those R rows only."""


class EagleDraftExtendCudaGraphRunner(BaseDraftRunner):
    """Widths are those of the target's steps: 1 after decode, k + 1 after verify.

    Tokens that were rejected are computed with the others, so that the shape is fixed: what they leave in the KV lies
    past the row's length and is overwritten before it can be read.

    Args:
        inputs: where the round is copied to before each run.
        state: gets hidden rows and first drafts, in the batch's order.
    """

    def __init__(
        self,
        capture: DraftCapture,
        *,
        extend: ExtendForward,
        inputs: RoundInputs,
        state: EagleState,
        widths: Sequence[int],
        name: str = "eagle_draft_extend_cuda_graph_runner",
    ) -> None:
        super().__init__(capture, widths=widths, name=name)
        self._extend, self.inputs, self.state = extend, inputs, state

    def forward_over(self, views: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """Place the step's tokens, run over all of them, draft from each row's newest. In graph."""
        self.place_round(views, self.inputs)
        hidden, token_ids = self._extend(views, self.inputs.hidden[: views.num_tokens], variant)
        self.state.store(hidden, token_ids)
        return ModelOutput(token_ids=token_ids, hidden_states=hidden)

    def poison_inputs(self, value: int) -> None:
        """See `BaseDraftRunner.poison_inputs`."""
        self.inputs.poison(value)
