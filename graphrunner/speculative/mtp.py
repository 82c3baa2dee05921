"""Multi-token-prediction heads: each takes every step in, and each drafts one token further than the one before.

Source: see models/mtp.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.errors import ConfigError
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.sampling_params import MAX_SPECULATIVE_TOKENS
from graphrunner.core.scheduled_batch import RowInit
from graphrunner.core.shape_key import ForwardMode, ForwardVariant
from graphrunner.models.mtp import MTPDraft, count_mtp_heads, load_mtp
from graphrunner.runner.base_draft_runner import variant_of
from graphrunner.runner.base_graph_runner import BaseGraphRunner
from graphrunner.runner.multi_layer_eagle_draft_extend_cuda_graph_runner import (
    MultiLayerEagleDraftExtendCudaGraphRunner,
)
from graphrunner.runner.round_inputs import RoundInputs
from graphrunner.speculative.draft_controller import widths_of
from graphrunner.speculative.draft_pick import pick_drafts
from graphrunner.speculative.draft_runners import RunnerParts
from graphrunner.speculative.prompt_round import PromptRound, PromptTokens
from graphrunner.speculative.proposer import DeviceProposer, DraftRound, ProposerContext, Target, TargetNeeds
from graphrunner.speculative.shipped_drafts import draft_path, native_target
from graphrunner.weights.source import ModelSource


def create_proposer(config: SpeculativeConfig, target: Target) -> MTPProposer:
    """See `registry.PROPOSERS`. Raises ConfigError when more drafts are asked for than there are heads."""
    wanted = config.num_drafts
    draft = load_mtp(draft_path(config, target.source), native_target(config, target), wanted)
    if draft.num_heads < wanted:
        problem = f"must be at most {draft.num_heads}, the heads of this checkpoint: leave it out to use them all"
        raise ConfigError("speculative_config.num_speculative_tokens", wanted, problem)
    return MTPProposer(draft, widths_of(config))


def default_num_drafts(config: SpeculativeConfig, source: ModelSource) -> int:
    """See `registry.settled`: every head drafts one token."""
    return min(count_mtp_heads(draft_path(config, source)), MAX_SPECULATIVE_TOKENS)


class MTPProposer(DeviceProposer):
    """One recording a round: all heads.

    Args:
        draft: loaded.
        widths: query lengths of verify steps.
    """

    needs = TargetNeeds(hidden_states=True)

    def __init__(self, draft: MTPDraft, widths: Sequence[int]) -> None:
        self.kv_spec = draft.kv_spec
        self.draft = draft
        self._widths = tuple(widths)
        self._known = PromptTokens()

    def bind(self, context: ProposerContext) -> None:
        """See `Proposer.bind`."""
        target, self._context = self.draft.target, context
        parts = RunnerParts(context, target.config.vocab_size - 1)
        self._inputs = RoundInputs(
            parts.max_reqs,
            self._widths[-1],
            hidden_size=target.config.hidden_size,
            dtype=target.options.dtype,
            device=target.options.device,
        )
        drafts = torch.zeros(parts.max_reqs, self.draft.num_heads, dtype=torch.int32, device=target.options.device)
        self._runner = MultiLayerEagleDraftExtendCudaGraphRunner(
            parts.of_runner(),
            head=self._head,
            inputs=self._inputs,
            heads=range(self.draft.num_heads),
            drafts=drafts,
            widths=(1, *self._widths),
        )
        self._is_recorded = parts.is_recorded

    def keeper(self) -> RoundInputs:
        """See `DeviceProposer.keeper`."""
        return self._inputs

    def modules(self) -> Sequence[nn.Module]:
        """See `Proposer.modules`."""
        return (self.draft,)

    def runners(self) -> Sequence[BaseGraphRunner]:
        """See `Proposer.runners`."""
        return (self._runner,) if self._is_recorded else ()

    def take_rows(self, row_inits: Sequence[RowInit]) -> None:
        """See `Proposer.take_rows`."""
        self._known.take_rows(row_inits)

    def propose(self, round_: DraftRound) -> None:
        """See `DeviceProposer.propose`."""
        if round_.batch.mode not in (ForwardMode.DECODE, ForwardMode.VERIFY):
            self._take_prompts(round_)
            return
        assert round_.hidden_states is not None, "the target was asked for its hidden states"
        self._inputs.take(round_.token_ids, round_.num_new, round_.hidden_states)
        self._runner.run(round_.batch)

    def _take_prompts(self, round_: DraftRound) -> None:
        num_heads = self.draft.num_heads
        prompts = PromptRound(round_, self._known, self._context.runner_context.kv_layers, num_heads)
        hidden = self.draft.start(prompts.hidden(round_.hidden_states))
        made = []
        for index in range(num_heads):
            hidden = self.draft(index, hidden, prompts.batch)
            made.append(self._picked(index, hidden, prompts.chosen_last, prompts, variant_of(round_.batch)))
            if index + 1 < num_heads:
                prompts = prompts.moved_on(index + 1, made[-1])
        if prompts.chosen:
            self._runner.store_drafts(prompts.request_rows, made)

    def _picked(
        self, index: int, hidden: Tensor, last: Tensor, prompts: PromptRound, variant: ForwardVariant
    ) -> Tensor:
        positions = prompts.batch.positions.index_select(0, last)
        return self._pick(index, hidden.index_select(0, last), prompts.request_rows, positions, variant)

    def _head(self, index: int, batch: ForwardBatch, hidden: Tensor, variant: ForwardVariant) -> tuple[Tensor, Tensor]:
        hidden = self.draft(index, self.draft.start(hidden) if index == 0 else hidden, batch)
        rows = hidden.index_select(0, batch.logits_indices)
        positions = batch.positions.index_select(0, batch.logits_indices)
        return hidden, self._pick(index, rows, batch.request_rows, positions, variant)

    def _pick(
        self, index: int, rows: Tensor, request_rows: Tensor, positions: Tensor, variant: ForwardVariant
    ) -> Tensor:
        """Head i, after reading position t, speaks of t + 2 + i."""
        return pick_drafts(
            self.draft.heads[index],
            rows,
            rows=self._context.sampling_rows,
            request_rows=request_rows,
            positions=positions + 2 + index,
            variant=variant,
        )
