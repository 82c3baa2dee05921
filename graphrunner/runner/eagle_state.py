"""What an EAGLE extend leaves for the draft loops after it, and what those that branch are built from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.kernels.tracing import has_gpu_kernels

LayerForward = Callable[[ForwardBatch, torch.Tensor], torch.Tensor]
"""(batch of the same number of tokens in each request, hidden [T, C]) -> hidden [T, C]."""

Branch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, ForwardVariant], tuple[torch.Tensor, torch.Tensor]]
"""(hidden rows [N, C], request_rows int32 [N], positions of the drafted tokens int64 [N], how many, variant) -> the
likeliest tokens of each row, int32 [N, how many], likeliest first, and the log of their chances, fp32 of that shape."""


def branch_out(
    branch: Branch,
    hidden: torch.Tensor,
    request_rows: torch.Tensor,
    positions: torch.Tensor,
    count: int,
    variant: ForwardVariant,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick the children of the same number of tokens in each request, with one product for all of them. In graph: yes.

    Args:
        hidden: [R, P, C], contiguous; what those tokens left.
        request_rows: int32 [R]; positions: int64 [R], of the children.
        count: children of each token.

    Returns:
        Tokens int32 and logs of chances fp32, [R, P, count] each.
    """
    num_reqs, num_parents = hidden.shape[:2]
    if num_parents > 1 and variant is not ForwardVariant.GREEDY:  # greedy guesses depend on nothing but hidden rows
        request_rows, positions = (each.repeat_interleave(num_parents) for each in (request_rows, positions))
    tokens, scores = branch(hidden.flatten(0, 1), request_rows, positions, count, variant)
    return tokens.view(num_reqs, num_parents, count), scores.view(num_reqs, num_parents, count)


class EagleState:
    """Static rows, in the order of the batch whose drafts are made next.

    Attributes:
        hidden: model dtype [max_reqs, C]; the draft's output at each row's newest position.
        token_ids: int32 [max_reqs]; the first draft of each row.
    """

    def __init__(self, max_reqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.hidden = torch.zeros(max_reqs, hidden_size, dtype=dtype, device=device)
        self.token_ids = torch.zeros(max_reqs, dtype=torch.int32, device=device)

    def store(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Overwrite the first rows. In graph: yes."""
        if has_gpu_kernels(hidden):
            from graphrunner.kernels.triton import round_rows

            round_rows.copy_round(hidden.contiguous(), token_ids, self.hidden, self.token_ids)
            return
        self.hidden[: hidden.shape[0]].copy_(hidden)
        self.token_ids[: token_ids.shape[0]].copy_(token_ids)
