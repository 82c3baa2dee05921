"""What a verify step whose drafts branch reads beyond a plain one."""

from __future__ import annotations

import torch

from graphrunner.core.draft_tree import DraftTree, TreeGrowth
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.kernels.tracing import has_gpu_kernels
from graphrunner.runner.request_table import RequestTable


class TreeStep:
    """The shape of each request's tree on the device: the same each time, or as the round before left it.

    Args:
        tree: of drafts.
        max_reqs: most requests of a step.

    Attributes:
        mask: uint8 [max_reqs, W, W]; see `ForwardBatch.tree_mask`.
        parents: int64 [max_reqs, W - 1]; see `ForwardBatch.tree_parents`.
    """

    def __init__(self, tree: DraftTree | TreeGrowth, max_reqs: int, device: torch.device) -> None:
        self._is_grown = isinstance(tree, TreeGrowth)
        parents = tuple(range(tree.num_nodes)) if isinstance(tree, TreeGrowth) else tree.parents
        shape = DraftTree(parents)
        seen = torch.tensor(shape.sees(), device=device).to(torch.uint8)
        self.mask = seen.expand(max_reqs, -1, -1).contiguous()
        self.parents = torch.tensor(parents, device=device).expand(max_reqs, -1).contiguous()
        self._depths = torch.tensor(shape.depths, device=device).expand(max_reqs, -1).contiguous()
        self._num_doublings = (tree.num_levels - 1).bit_length()

    def place(self, views: ForwardBatch, table: RequestTable) -> None:
        """Give each token the position it would stand at; its KV stays where it is. In graph: yes.

        Args:
            views: gathered as a step of one draft after the other.
        """
        num_reqs = views.num_reqs
        if has_gpu_kernels(views.seq_lens):
            self._place_in_one_launch(views, table)
            return
        width = views.num_tokens // num_reqs
        if self._is_grown:
            self._take(table.draft_parents.index_select(0, views.request_rows).long())
        first = views.seq_lens.long() - width
        views.positions.copy_((first.unsqueeze(1) + self._depths[:num_reqs]).flatten())

    def _place_in_one_launch(self, views: ForwardBatch, table: RequestTable) -> None:
        from graphrunner.kernels.triton import tree_rows

        tree_rows.place_tree(
            views.seq_lens,
            self.parents,
            views.positions,
            request_rows=views.request_rows,
            mask=self.mask,
            draft_parents=table.draft_parents if self._is_grown else None,
        )

    def _take(self, parents: torch.Tensor) -> None:
        """Mask and depths of trees that grew: int64 [R, W - 1]."""
        num_reqs, width = parents.shape[0], parents.shape[1] + 1
        follows = torch.eye(width, device=parents.device).repeat(num_reqs, 1, 1)
        follows[:, 1:].scatter_(2, parents.unsqueeze(2), 1.0)
        for _ in range(self._num_doublings):  # who is followed by whom one follows
            follows = torch.bmm(follows, follows)
        sees = follows > 0
        self.parents[:num_reqs].copy_(parents)
        self.mask[:num_reqs].copy_(sees)
        self._depths[:num_reqs].copy_(sees.sum(-1) - 1)
