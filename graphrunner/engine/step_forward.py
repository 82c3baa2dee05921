"""The closure that runners are given: model, logits and, by variant, sampling and the acceptance of drafts."""

from __future__ import annotations

import torch

from graphrunner.core.active_batch import active_batch
from graphrunner.core.draft_tree import DraftTree, TreeGrowth
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.kernels.batch_invariance import batch_invariant
from graphrunner.models.registry import LanguageModel
from graphrunner.sampling.sampler import Sampler
from graphrunner.sampling.tree import PathPicker
from graphrunner.sampling.verifier import Verifier, accept
from graphrunner.speculative.proposer import TargetNeeds


class StepForward:
    """Everything between the gathered inputs and the outputs of one step.

    Args:
        verifier: accepts the drafts of VERIFY steps.
        needs: what a proposer reads of every step.
        tree: how drafts branch; None for one guess after the other.
        is_batch_invariant: run with kernels whose result for a row depends on that row alone.
    """

    def __init__(
        self,
        model: LanguageModel,
        sampler: Sampler,
        verifier: Verifier,
        needs: TargetNeeds | None = None,
        *,
        tree: DraftTree | TreeGrowth | None = None,
        is_batch_invariant: bool = False,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._verifier = verifier
        self._needs = needs or TargetNeeds()
        self._paths = None if tree is None else PathPicker(tree.num_levels, tree.num_tokens)
        self._is_batch_invariant = is_batch_invariant
        sampler.logits_of = self._logits_of

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """See `ForwardVariant` for what comes back. In graph: yes."""
        with batch_invariant(self._is_batch_invariant):
            return self._run(batch, variant)

    @torch.inference_mode()
    def tail(self, hidden_rows: torch.Tensor) -> ModelOutput:
        """Logits of hidden rows, outside the graph."""
        return ModelOutput(logits=self._logits_of(hidden_rows))

    def _logits_of(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        with batch_invariant(self._is_batch_invariant):
            return self._model.logits(hidden_rows)

    def _run(self, batch: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        is_hidden = variant is ForwardVariant.HIDDEN
        keeps_hidden = is_hidden or self._needs.hidden_states
        taps = dict.fromkeys(self._needs.aux_layers, batch.positions)
        with active_batch(batch):  # a foreign model's attention can be handed nothing
            hidden = self._model(batch, only_logits_rows=not keeps_hidden, taps=taps or None)
        kept = hidden if keeps_hidden else None
        aux = torch.cat([taps[index] for index in self._needs.aux_layers], dim=-1) if taps else None
        if is_hidden:
            return ModelOutput(hidden_states=kept, aux_hidden_states=aux)
        if variant is ForwardVariant.LOGITS:
            return ModelOutput(logits=self._model.logits(hidden), hidden_states=kept, aux_hidden_states=aux)
        if batch.tree_mask is not None:
            return self._path(hidden, batch, variant, kept, aux)
        token_ids, num_new = self._picked(hidden, batch, variant)
        return ModelOutput(token_ids=token_ids, num_new=num_new, hidden_states=kept, aux_hidden_states=aux)

    def _path(
        self,
        hidden: torch.Tensor,
        batch: ForwardBatch,
        variant: ForwardVariant,
        kept: torch.Tensor | None,
        aux: torch.Tensor | None,
    ) -> ModelOutput:
        """Of a step whose drafts branch, what a step of its longest right path would have left."""
        assert self._paths is not None and batch.draft_tokens is not None, "a verify step over a tree"
        assert batch.tree_parents is not None, "who follows whom comes with the mask"
        target_ids = self._model.greedy_tokens(hidden) if variant is ForwardVariant.GREEDY else None
        if target_ids is None:
            rows = batch.request_rows.repeat_interleave(batch.max_query_len, output_size=batch.num_tokens)
            positions = (batch.positions + 1).to(torch.int32)
            target_ids = self._sampler.sample_in_graph(self._model.logits(hidden), rows, positions, variant)
        path = self._paths.accept(batch.draft_tokens, target_ids, batch.tree_parents)
        assert kept is None or aux is None, "a proposer reads one or the other"
        moved = self._paths.keep(batch, path.order, kept if aux is None else aux)
        kept, aux = (None if one is None else moved for one in (kept, aux))
        return ModelOutput(token_ids=path.token_ids, num_new=path.num_new, hidden_states=kept, aux_hidden_states=aux)

    def _picked(
        self, hidden: torch.Tensor, batch: ForwardBatch, variant: ForwardVariant
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens of a decode step; of a verify step what stands of the drafts, and how much that is."""
        drafts = batch.draft_tokens
        if variant is ForwardVariant.GREEDY:
            token_ids = self._model.greedy_tokens(hidden)
            if token_ids is not None:
                return (token_ids, None) if drafts is None else accept(drafts, token_ids)
        return self.pick(self._model.logits(hidden), batch, variant)

    def pick(
        self, logits: torch.Tensor, batch: ForwardBatch, variant: ForwardVariant
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens of logits (and, of a verify step, how many), from device state alone. In graph: yes. Sync: none."""
        drafts = batch.draft_tokens
        if drafts is not None:
            return self._verifier.accept_in_graph(logits, batch.request_rows, batch.positions, drafts, variant)
        return self._sampler.sample_in_graph(logits, batch.request_rows, batch.seq_lens, variant), None
