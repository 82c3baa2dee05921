"""A round's tree of drafts, grown where the draft is surest, sampling included, in one recording."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrunner.core.draft_tree import LEAST_SURE, SUREST, TreeGrowth
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.kernels.tracing import has_gpu_kernels
from graphrunner.runner.base_draft_runner import BaseDraftRunner, DraftCapture
from graphrunner.runner.eagle_state import Branch, EagleState, LayerForward, branch_out


@dataclass(slots=True)
class _Beams:
    """The guesses of one level from which the draft goes on: B of them a request.

    Attributes:
        tokens: int32 [R, B]; scores: fp32 [R, B], the log of the chance that the path to each stands.
        candidates: int64 [R, B], their numbers among all candidates, from 1.
        hidden: [R, B, C]; what each follows left.
        sees: uint8 [R, B, beams so far]; which of those it follows, itself included.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    candidates: torch.Tensor
    hidden: torch.Tensor
    sees: torch.Tensor


class EagleGrownTreeDraftCudaGraphRunner(BaseDraftRunner):
    """Takes a decode batch, as `EagleDraftCudaGraphRunner`; drafts level by level.

    Each level goes on from its best guesses, by the chance of the whole path to them. Of all guesses the best are kept,
    parents before children; they go to `RequestTable.draft_tokens`, what each follows to `draft_parents`. Like the
    runner of fixed trees it runs the draft over all guesses so far.

    Args:
        layer: the draft over a step.
        branch: picks the children of guesses.
        state: where the extend left hidden rows.
        tree: how far it grows.
    """

    def __init__(
        self,
        capture: DraftCapture,
        *,
        layer: LayerForward,
        branch: Branch,
        state: EagleState,
        tree: TreeGrowth,
        name: str = "eagle_grown_tree_draft_cuda_graph_runner",
    ) -> None:
        num_computed = tree.num_beams * max(1, tree.num_levels - 1)
        super().__init__(capture, widths=(1,), width_inside=num_computed, name=name)
        self._layer, self._branch, self.state, self._tree = layer, branch, state, tree
        device = capture.context.device
        self._offsets = torch.arange(num_computed, device=device) // tree.num_beams

    def forward_over(self, views: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """Draft, level by level; keep the best. In graph."""
        if has_gpu_kernels(self.state.hidden):
            return self._draft_with_kernels(views, variant)
        tree, num_reqs = self._tree, views.num_reqs
        newest = self.context.table.num_computed.index_select(0, views.request_rows)
        root = self.state.hidden[:num_reqs].unsqueeze(1)
        tokens, scores = self._children(root, views, newest + 1, variant)
        parents = torch.zeros_like(tokens, dtype=torch.int64)
        all_tokens, all_scores, all_parents = [tokens], [scores], [parents]
        levels: list[_Beams] = []
        for depth in range(1, tree.num_levels):
            levels.append(self._chosen(all_tokens, all_scores, root, levels))
            hidden = self._compute(views, newest, levels)
            tokens, own = self._children(hidden, views, newest + depth + 1, variant)
            beams = levels[-1]
            all_tokens.append(tokens)
            all_scores.append(beams.scores.repeat_interleave(tree.num_children, 1) + own)
            all_parents.append(beams.candidates.repeat_interleave(tree.num_children, 1))
            root = hidden
        drafts = self._keep(views, *(torch.cat(column, 1) for column in (all_tokens, all_scores, all_parents)))
        return ModelOutput(token_ids=drafts[:, 0].clone())

    def _draft_with_kernels(self, views: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """The same, a launch a level around the draft itself."""
        from graphrunner.kernels.triton import grow_tree
        from graphrunner.kernels.triton.request_rows import DecodeInputs

        tree, table, num_reqs = self._tree, self.context.table, views.num_reqs
        out = DecodeInputs(views.input_ids, views.positions, views.seq_lens, views.slot_mapping)
        newest = None
        if variant is not ForwardVariant.GREEDY:  # see `branch_out`
            newest = table.num_computed.index_select(0, views.request_rows)
        left = self.state.hidden[:num_reqs]
        growth = grow_tree.new_growth(tree, left)
        rows = left.unsqueeze(1)
        for level in range(tree.num_levels):
            places = views.request_rows if newest is None else newest + level + 1
            guesses = branch_out(self._branch, rows, views.request_rows, places, tree.num_children, variant)
            if level == tree.num_levels - 1:
                break
            mask, inputs = grow_tree.grow(
                growth, tree, level, guesses=guesses, left=left, request_rows=views.request_rows,
                num_computed=table.num_computed, page_table=table.page_table, page_size=self.context.page_size,
                max_token_id=self._max_token_id, out=out,
            )  # fmt: skip
            num_tokens = inputs.shape[1]
            step = self.first_tokens(views, num_tokens, mask)
            left = self._layer(step, inputs.flatten(0, 1)).view(num_reqs, num_tokens, -1)
            rows = left[:, -tree.num_beams :].contiguous()
        first = grow_tree.keep_best(
            growth, tree, guesses=guesses, request_rows=views.request_rows, drafts=table.draft_tokens,
            draft_parents=table.draft_parents,
        )  # fmt: skip
        return ModelOutput(token_ids=first)

    def _children(
        self, hidden: torch.Tensor, views: ForwardBatch, positions: torch.Tensor, variant: ForwardVariant
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of [R, B, C] hidden rows: tokens int32 and scores fp32, [R, B * num_children] each."""
        count = self._tree.num_children
        tokens, scores = branch_out(self._branch, hidden.contiguous(), views.request_rows, positions, count, variant)
        return tokens.flatten(1), scores.clamp(LEAST_SURE, SUREST).flatten(1)

    def _chosen(
        self,
        all_tokens: list[torch.Tensor],
        all_scores: list[torch.Tensor],
        parent_hidden: torch.Tensor,
        levels: list[_Beams],
    ) -> _Beams:
        """The best guesses of the newest level."""
        scores, places = all_scores[-1].topk(self._tree.num_beams, dim=1)
        tokens = all_tokens[-1].gather(1, places)
        parents = places // self._tree.num_children
        width = parent_hidden.shape[2]
        hidden = parent_hidden.gather(1, parents.unsqueeze(2).expand(-1, -1, width))
        candidates = places + 1 + sum(column.shape[1] for column in all_tokens[:-1])
        num_reqs, num_beams = tokens.shape
        own = torch.eye(num_beams, dtype=torch.uint8, device=tokens.device).expand(num_reqs, -1, -1)
        if not levels:
            return _Beams(tokens, scores, candidates, hidden, own)
        before = levels[-1].sees
        inherited = before.gather(1, parents.unsqueeze(2).expand(-1, -1, before.shape[2]))
        return _Beams(tokens, scores, candidates, hidden, torch.cat((inherited, own), 2))

    def _compute(self, views: ForwardBatch, newest: torch.Tensor, levels: list[_Beams]) -> torch.Tensor:
        """Run the draft over the beams of all levels; what it leaves for the newest: [R, B, C]."""
        num_beams, num_tokens = self._tree.num_beams, self._tree.num_beams * len(levels)
        masks = [
            torch.nn.functional.pad(beams.sees, (0, num_tokens - beams.sees.shape[2])) for beams in levels
        ]  # fmt: skip
        step = self.first_tokens(views, num_tokens, torch.cat(masks, 1))
        self.place_step(step, torch.cat([beams.tokens for beams in levels], 1).flatten(), 0)
        step.positions.copy_((newest.unsqueeze(1) + self._offsets[:num_tokens]).flatten())
        inputs = torch.cat([beams.hidden for beams in levels], 1)
        outputs = self._layer(step, inputs.flatten(0, 1)).view(views.num_reqs, num_tokens, -1)
        return outputs[:, -num_beams:]

    def _keep(
        self, views: ForwardBatch, tokens: torch.Tensor, scores: torch.Tensor, parents: torch.Tensor
    ) -> torch.Tensor:
        """Leave the best candidates in the request table: int32 [R, num_nodes]. A parent is always better."""
        chosen = scores.topk(self._tree.num_nodes, dim=1).indices.sort(dim=1).values
        numbers = parents.gather(1, chosen)  # of the parents among the candidates, 0 for none
        # A candidate's place among the chosen is how many of them stand before it.
        nodes = ((chosen + 1).unsqueeze(1) <= numbers.unsqueeze(2)).sum(2)
        drafts = tokens.gather(1, chosen)
        self.store_drafts(views.request_rows, drafts.unbind(1))
        self.context.table.draft_parents.index_copy_(0, views.request_rows.long(), nodes.to(torch.int32))
        return drafts

    def poison_inputs(self, value: int) -> None:
        """See `BaseDraftRunner.poison_inputs`."""
        self.state.hidden.fill_(float("nan"))
        self.state.token_ids.fill_(value)
