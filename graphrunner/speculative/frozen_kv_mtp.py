"""A draft head that reads the target's KV and keeps none: there is nothing to take in, only to draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.shape_key import ForwardMode, ForwardVariant
from graphrunner.models.frozen_kv import FrozenKVDraft, load_frozen_kv
from graphrunner.runner.base_draft_runner import draft_batch
from graphrunner.runner.base_graph_runner import BaseGraphRunner
from graphrunner.runner.frozen_kv_mtp_cuda_graph_runner import FrozenKVMTPCudaGraphRunner
from graphrunner.runner.round_inputs import RoundInputs
from graphrunner.speculative.draft_controller import widths_of
from graphrunner.speculative.draft_pick import pick_drafts
from graphrunner.speculative.draft_runners import RunnerParts
from graphrunner.speculative.prompt_round import PromptRound, PromptTokens
from graphrunner.speculative.proposer import DeviceProposer, DraftRound, ProposerContext, Target, TargetNeeds
from graphrunner.speculative.shipped_drafts import draft_path, native_target


def create_proposer(config: SpeculativeConfig, target: Target) -> FrozenKVProposer:
    """See `registry.PROPOSERS`."""
    draft = load_frozen_kv(draft_path(config, target.source), native_target(config, target))
    widths = widths_of(config)
    return FrozenKVProposer(draft, widths, config.num_drafts)


class FrozenKVProposer(DeviceProposer):
    """One recording a round.

    Args:
        draft: loaded.
        widths: query lengths of verify steps.
        num_drafts: most drafts; all are made each time, they cost little.
    """

    needs = TargetNeeds(hidden_states=True)

    def __init__(self, draft: FrozenKVDraft, widths: Sequence[int], num_drafts: int) -> None:
        self.draft = draft
        self._widths, self._num_drafts = tuple(widths), num_drafts
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
        over_target = replace(context.runner_context, kv_layers=context.target_kv_layers)
        self._runners = {
            width: FrozenKVMTPCudaGraphRunner(
                parts.of_runner(over_target),
                step=self._step,
                inputs=self._inputs,
                query_width=width,
                num_drafts=self._num_drafts,
                name=f"frozen_kv_mtp_{width}",
            )
            for width in (1, *self._widths)
        }
        self._is_recorded = parts.is_recorded

    def keeper(self) -> RoundInputs:
        """See `DeviceProposer.keeper`."""
        return self._inputs

    def modules(self) -> Sequence[nn.Module]:
        """See `Proposer.modules`."""
        return (self.draft,)

    def runners(self) -> Sequence[BaseGraphRunner]:
        """See `Proposer.runners`."""
        return tuple(self._runners.values()) if self._is_recorded else ()

    def propose(self, round_: DraftRound) -> None:
        """See `DeviceProposer.propose`."""
        batch, hidden = round_.batch, round_.hidden_states
        assert hidden is not None, "the target was asked for its hidden states"
        if round_.num_drafts == 0 or not any(batch.samples):
            return
        if batch.mode in (ForwardMode.DECODE, ForwardMode.VERIFY):
            self._inputs.take(round_.token_ids, round_.num_new, hidden)
            self._runners[batch.max_query_len].run(batch)
            return
        prompts = PromptRound(round_, self._known, self._context.target_kv_layers)
        places = prompts.chosen_last
        ones = places.new_ones(places.shape[0]).int()
        self._inputs.take(ones, ones, hidden.index_select(0, places))
        self._runners[1].run(draft_batch(batch))

    def _step(self, index: int, batch: ForwardBatch, hidden: Tensor, variant: ForwardVariant) -> tuple[Tensor, Tensor]:
        rows = self.draft(self.draft.start(hidden) if index == 0 else hidden, batch)
        tokens = pick_drafts(
            self.draft.head,
            rows,
            rows=self._context.sampling_rows,
            request_rows=batch.request_rows,
            positions=batch.positions + 2,
            variant=variant,
        )
        return rows, tokens
