"""A round's tree of drafts, sampling included, in one recording."""

from __future__ import annotations

import torch

from graphrunner.core.draft_tree import DraftTree
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.runner.base_draft_runner import BaseDraftRunner, DraftCapture
from graphrunner.runner.eagle_state import Branch, EagleState, LayerForward, branch_out


class EagleTreeDraftCudaGraphRunner(BaseDraftRunner):
    """Takes a decode batch, as `EagleDraftCudaGraphRunner`; drafts level by level.

    Every level runs the draft over all nodes so far, each of which sees those it follows: the few that are computed
    again cost less than a kernel that could look them up.

    Args:
        layer: the draft over a step.
        branch: picks the children of nodes.
        state: where the extend left hidden rows.
    """

    def __init__(
        self,
        capture: DraftCapture,
        *,
        layer: LayerForward,
        branch: Branch,
        state: EagleState,
        tree: DraftTree,
        name: str = "eagle_tree_draft_cuda_graph_runner",
    ) -> None:
        # Leaves are drafted, never computed.
        num_computed = max(1, len(tree.parents) - len(tree.level(tree.num_levels)))
        super().__init__(capture, widths=(1,), width_inside=num_computed, name=name)
        self._layer, self._branch, self.state, self._tree = layer, branch, state, tree
        device = capture.context.device
        self._offsets = torch.tensor(tree.depths[1 : num_computed + 1], device=device) - 1
        seen = torch.tensor([row[1 : num_computed + 1] for row in tree.sees()[1 : num_computed + 1]], device=device)
        self._mask = seen.to(torch.uint8).expand(self.max_reqs, -1, -1)

    def forward_over(self, views: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """Draft, level by level. In graph."""
        tree = self._tree
        newest = self.context.table.num_computed.index_select(0, views.request_rows)
        hidden = {0: self.state.hidden[: views.num_reqs]}
        tokens: dict[int, torch.Tensor] = {}
        for depth in range(1, tree.num_levels + 1):
            families = {token: tree.children(token) for token in tree.level(depth - 1) if tree.children(token)}
            rows = torch.stack([hidden[parent] for parent in families], dim=1)
            count = max(len(nodes) for nodes in families.values())
            picked, _ = branch_out(self._branch, rows, views.request_rows, newest + depth, count, variant)
            for place, nodes in enumerate(families.values()):
                tokens |= {node: picked[:, place, rank] for rank, node in enumerate(nodes)}
            if depth < tree.num_levels:
                self._compute(views, newest, tree.level(depth).stop - 1, hidden, tokens)
        drafts = [tokens[node] for node in range(1, tree.num_tokens)]
        self.store_drafts(views.request_rows, drafts)
        return ModelOutput(token_ids=drafts[0].clone())

    def _compute(
        self,
        views: ForwardBatch,
        newest: torch.Tensor,
        num_nodes: int,
        hidden: dict[int, torch.Tensor],
        tokens: dict[int, torch.Tensor],
    ) -> None:
        """Run the draft over the first nodes; fills in what each leaves."""
        mask = self._mask[: views.num_reqs, :num_nodes, :num_nodes]
        step = self.first_tokens(views, num_nodes, mask)
        nodes = range(1, num_nodes + 1)
        self.place_step(step, torch.stack([tokens[node] for node in nodes], dim=1).flatten(), 0)
        step.positions.copy_((newest.unsqueeze(1) + self._offsets[:num_nodes]).flatten())
        inputs = torch.stack([hidden[self._tree.parents[node - 1]] for node in nodes], dim=1)
        outputs = self._layer(step, inputs.flatten(0, 1)).view(views.num_reqs, num_nodes, -1)
        hidden.update({node: outputs[:, node - 1] for node in nodes})

    def poison_inputs(self, value: int) -> None:
        """See `BaseDraftRunner.poison_inputs`."""
        self.state.hidden.fill_(float("nan"))
        self.state.token_ids.fill_(value)
