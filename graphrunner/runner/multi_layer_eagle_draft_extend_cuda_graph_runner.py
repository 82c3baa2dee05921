"""Multi-token heads take in what the target's step computed; each makes one draft of each row. All heads are one
recording, or each its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.runner.base_draft_runner import BaseDraftRunner, DraftCapture
from graphrunner.runner.round_inputs import RoundInputs

HeadForward = Callable[[int, ForwardBatch, torch.Tensor, ForwardVariant], tuple[torch.Tensor, torch.Tensor]]
"""(head, batch, hidden [T, C], variant) -> hidden [T, C] and drafts int32 [R] of the rows at `batch.logits_indices`."""


class MultiLayerEagleDraftExtendCudaGraphRunner(BaseDraftRunner):
    """Head i reads the tokens 1 + i places after each position: the round's own, then the drafts of the heads before.

    Hidden states and shifted tokens go from head to head in `inputs`, in place, so that heads recorded apart find them.

    Args:
        head: runs one head.
        inputs: where the round is copied to before head 0 runs.
        heads: which heads are in this recording, in order.
        drafts: int32 [max_reqs, num_heads], device; every head's drafts, shared by the runners of all heads.
        widths: those of the target's steps.
    """

    def __init__(
        self,
        capture: DraftCapture,
        *,
        head: HeadForward,
        inputs: RoundInputs,
        heads: Sequence[int],
        drafts: torch.Tensor,
        widths: Sequence[int],
        name: str = "multi_layer_eagle_draft_extend_cuda_graph_runner",
    ) -> None:
        super().__init__(capture, widths=widths, name=name)
        self._head, self.inputs, self.heads, self.drafts = head, inputs, tuple(heads), drafts

    def forward_over(self, views: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """Place the step's tokens, run the heads one after the other. In graph."""
        num_reqs, num_tokens, inputs = views.num_reqs, views.num_tokens, self.inputs
        for index in self.heads:
            self.place_round(views, inputs)
            hidden, drafts = self._head(index, views, inputs.hidden[:num_tokens].clone(), variant)
            self.drafts[:num_reqs, index].copy_(drafts)
            inputs.hidden[:num_tokens].copy_(hidden)
            inputs.token_ids[:num_tokens].copy_(shifted(views.input_ids, views.logits_indices, drafts))
        self.store_drafts(views.request_rows, self.drafts[:num_reqs, : self.heads[-1] + 1].unbind(1))
        return ModelOutput(token_ids=drafts)

    def poison_inputs(self, value: int) -> None:
        """See `BaseDraftRunner.poison_inputs`."""
        self.inputs.poison(value)
        self.drafts.fill_(value)


def shifted(token_ids: torch.Tensor, last: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Tokens one place further on: int32 [T]; at `last` (int64 [R]) stand the drafts (int32 [R]). In graph: yes."""
    later = torch.cat((token_ids[1:], token_ids[:1]))
    return later.index_copy(0, last, drafts.to(later.dtype))
