"""The draft takes in what the target's step computed, and makes its first draft of each row: one recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.execution.backend import ExecutionBackend
from graphrunner.runner.base_draft_runner import BaseDraftRunner, RoundInputs
from graphrunner.runner.eagle_state import EagleState
from graphrunner.runner.graph_account import GraphAccount
from graphrunner.runner.runner_context import RunnerContext

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
        context: RunnerContext,
        backend: ExecutionBackend,
        account: GraphAccount,
        sizes: Sequence[int],
        *,
        extend: ExtendForward,
        inputs: RoundInputs,
        state: EagleState,
        widths: Sequence[int],
        name: str = "eagle_draft_extend_cuda_graph_runner",
        max_token_id: int,
        is_lazy: bool = False,
        is_poisoning: bool = False,
    ) -> None:
        super().__init__(
            context,
            backend,
            account,
            sizes,
            widths=widths,
            name=name,
            max_token_id=max_token_id,
            is_lazy=is_lazy,
            is_poisoning=is_poisoning,
        )
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
