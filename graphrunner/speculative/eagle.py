"""EAGLE: a draft layer on the target's hidden states. An extend takes each step in, a loop drafts on from there.

Source: Li et al., EAGLE, 2024; Li et al., EAGLE-3, 2025.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from graphrunner.config.model_config import LayerType
from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.draft_tree import DraftTree, TreeGrowth
from graphrunner.core.errors import ConfigError
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.scheduled_batch import RowInit
from graphrunner.core.shape_key import ForwardMode, ForwardVariant
from graphrunner.models.eagle import EagleDraft, load_eagle
from graphrunner.runner.base_draft_runner import BaseDraftRunner, draft_batch, variant_of
from graphrunner.runner.base_graph_runner import BaseGraphRunner
from graphrunner.runner.eagle_draft_cuda_graph_runner import EagleDraftCudaGraphRunner
from graphrunner.runner.eagle_draft_extend_cuda_graph_runner import EagleDraftExtendCudaGraphRunner
from graphrunner.runner.eagle_grown_tree_draft_cuda_graph_runner import EagleGrownTreeDraftCudaGraphRunner
from graphrunner.runner.eagle_state import EagleState
from graphrunner.runner.eagle_tree_draft_cuda_graph_runner import EagleTreeDraftCudaGraphRunner
from graphrunner.runner.round_inputs import RoundInputs
from graphrunner.speculative.draft_controller import widths_of
from graphrunner.speculative.draft_pick import best_drafts, pick_drafts
from graphrunner.speculative.draft_runners import RunnerParts
from graphrunner.speculative.prompt_round import PromptRound, PromptTokens
from graphrunner.speculative.proposer import DeviceProposer, DraftRound, ProposerContext, Target, TargetNeeds
from graphrunner.speculative.shipped_drafts import draft_path, native_target


def create_proposer(config: SpeculativeConfig, target: Target) -> EagleProposer:
    """See `registry.PROPOSERS`."""
    model = native_target(config, target)
    if config.draft_tree is not None and any(layer is LayerType.SLIDING for layer in model.config.layer_types):
        problem = "needs a target without sliding windows: a window's border would cut branches at different places"
        is_fixed = config.speculative_eagle_topk is None
        field = "speculative_token_tree" if is_fixed else "speculative_eagle_topk"
        given = config.speculative_token_tree if is_fixed else config.speculative_eagle_topk
        raise ConfigError(f"speculative_config.{field}", given, problem)
    draft = load_eagle(draft_path(config, target.source), model)
    return EagleProposer(draft, widths_of(config), config.draft_tree)


class EagleProposer(DeviceProposer):
    """Two recordings a round.

    Args:
        draft: loaded.
        widths: query lengths of verify steps; each has its own number of drafts.
        tree: how drafts branch; None for one guess after the other.
    """

    def __init__(self, draft: EagleDraft, widths: Sequence[int], tree: DraftTree | TreeGrowth | None = None) -> None:
        self.needs = TargetNeeds(hidden_states=not draft.is_eagle3, aux_layers=draft.aux_layers)
        self.kv_spec = draft.kv_spec
        self.draft = draft
        self._widths, self._tree = tuple(widths), tree
        self.is_branching = tree is not None
        self._known = PromptTokens()

    def bind(self, context: ProposerContext) -> None:
        """See `Proposer.bind`."""
        target, self._context = self.draft.target, context
        parts = RunnerParts(context, target.config.vocab_size - 1)
        width = self.draft.config.hidden_size
        self._state = EagleState(parts.max_reqs, width, target.options.dtype, target.options.device)
        num_taps = len(self.draft.aux_layers) or 1
        self._inputs = RoundInputs(
            parts.max_reqs,
            self._widths[-1],
            hidden_size=num_taps * target.config.hidden_size,
            dtype=target.options.dtype,
            device=target.options.device,
            is_aux=self.draft.is_eagle3,
        )
        self._extend_runner = EagleDraftExtendCudaGraphRunner(
            parts.of_runner(),
            extend=self._extend,
            inputs=self._inputs,
            state=self._state,
            widths=(1, *self._widths),
        )
        self._loops = self._make_loops(parts)
        self._is_recorded = parts.is_recorded

    def keeper(self) -> RoundInputs:
        """See `DeviceProposer.keeper`."""
        return self._inputs

    def modules(self) -> Sequence[nn.Module]:
        """See `Proposer.modules`."""
        return (self.draft,)

    def _make_loops(self, parts: RunnerParts) -> dict[int, BaseDraftRunner]:
        """What drafts after the extend, by how many drafts it makes."""
        if isinstance(self._tree, TreeGrowth):
            grown = EagleGrownTreeDraftCudaGraphRunner(
                parts.of_runner(),
                layer=lambda batch, hidden: self.draft(hidden, batch),
                branch=self._branch,
                state=self._state,
                tree=self._tree,
            )
            return {self._tree.num_nodes: grown}
        if self._tree is not None:
            runner = EagleTreeDraftCudaGraphRunner(
                parts.of_runner(),
                layer=lambda batch, hidden: self.draft(hidden, batch),
                branch=self._branch,
                state=self._state,
                tree=self._tree,
            )
            return {len(self._tree.parents): runner}
        return {
            width - 1: EagleDraftCudaGraphRunner(
                parts.of_runner(),
                step=self._step,
                state=self._state,
                num_drafts=width - 1,
                name=f"eagle_draft_{width - 1}",
            )
            for width in self._widths
        }

    def runners(self) -> Sequence[BaseGraphRunner]:
        """See `Proposer.runners`."""
        return (self._extend_runner, *self._loops.values()) if self._is_recorded else ()

    def take_rows(self, row_inits: Sequence[RowInit]) -> None:
        """See `Proposer.take_rows`."""
        self._known.take_rows(row_inits)

    def propose(self, round_: DraftRound) -> None:
        """See `DeviceProposer.propose`."""
        batch = round_.batch
        if batch.mode in (ForwardMode.DECODE, ForwardMode.VERIFY):
            hidden = round_.aux_hidden_states if self.draft.is_eagle3 else round_.hidden_states
            assert hidden is not None, "the target was asked for its hidden states"
            self._inputs.take(round_.token_ids, round_.num_new, hidden)
            self._extend_runner.run(batch)
        else:
            self._take_prompts(round_)
        if round_.num_drafts and any(batch.samples):
            self._loop(round_.num_drafts).run(draft_batch(batch))

    def _loop(self, num_drafts: int) -> BaseDraftRunner:
        return next(runner for count, runner in self._loops.items() if count >= num_drafts)

    def _take_prompts(self, round_: DraftRound) -> None:
        prompts = PromptRound(round_, self._known, self._context.runner_context.kv_layers)
        states = round_.aux_hidden_states if self.draft.is_eagle3 else round_.hidden_states
        hidden = self.draft(self.draft.fuse(prompts.hidden(states)), prompts.batch)
        if prompts.chosen:
            rows = hidden.index_select(0, prompts.chosen_last)
            positions = prompts.batch.positions.index_select(0, prompts.chosen_last)
            drafts = self._picked(rows, prompts.request_rows, positions, variant_of(round_.batch))
            self._state.store(rows, drafts)

    def _extend(self, batch: ForwardBatch, hidden: Tensor, variant: ForwardVariant) -> tuple[Tensor, Tensor]:
        rows = self.draft(self.draft.fuse(hidden), batch).index_select(0, batch.logits_indices)
        positions = batch.positions.index_select(0, batch.logits_indices)
        return rows, self._picked(rows, batch.request_rows, positions, variant)

    def _step(self, batch: ForwardBatch, hidden: Tensor, variant: ForwardVariant) -> tuple[Tensor, Tensor]:
        rows = self.draft(hidden, batch)
        return rows, self._picked(rows, batch.request_rows, batch.positions, variant)

    def _picked(self, rows: Tensor, request_rows: Tensor, positions: Tensor, variant: ForwardVariant) -> Tensor:
        """What the draft says after reading position t and the token after it stands at t + 2."""
        is_greedy = variant is ForwardVariant.GREEDY  # whose drafts are the same at any position
        return pick_drafts(
            self.draft.head,
            rows,
            rows=self._context.sampling_rows,
            request_rows=request_rows,
            positions=positions if is_greedy else positions + 2,
            variant=variant,
        )

    def _branch(
        self, rows: Tensor, request_rows: Tensor, positions: Tensor, count: int, variant: ForwardVariant
    ) -> tuple[Tensor, Tensor]:
        return best_drafts(
            self.draft.head,
            rows,
            rows=self._context.sampling_rows,
            request_rows=request_rows,
            positions=positions,
            variant=variant,
            count=count,
        )
