"""What a verify step whose drafts branch reads beyond a plain one."""

from __future__ import annotations

import torch

from graphrunner.core.draft_tree import DraftTree
from graphrunner.core.forward_batch import ForwardBatch


class TreeStep:
    """Constants of a tree on the device.

    Args:
        tree: of drafts.
        max_reqs: most requests of a step.

    Attributes:
        mask: uint8 [max_reqs, W, W]; see `ForwardBatch.tree_mask`.
    """

    def __init__(self, tree: DraftTree, max_reqs: int, device: torch.device) -> None:
        seen = torch.tensor(tree.sees(), device=device).to(torch.uint8)
        self.mask = seen.expand(max_reqs, -1, -1).contiguous()
        self._depths = torch.tensor(tree.depths, device=device)

    def place(self, views: ForwardBatch) -> None:
        """Give each token the position it would stand at; its KV stays where it is. In graph: yes.

        Args:
            views: gathered as a step of one draft after the other.
        """
        width = views.num_tokens // views.num_reqs
        first = views.seq_lens.long() - width
        views.positions.copy_((first.unsqueeze(1) + self._depths).flatten())
