"""Which token a draft says, inside a recording."""

from __future__ import annotations

import torch
from torch import Tensor

from graphrunner.core.shape_key import ForwardVariant
from graphrunner.kernels.noise import gumbel_noise
from graphrunner.models.draft_head import DraftHead
from graphrunner.sampling.pick import filter_thresholds, finite_logits
from graphrunner.sampling.rows import SamplingRows


def pick_drafts(
    head: DraftHead,
    hidden_rows: Tensor,
    *,
    rows: SamplingRows,
    request_rows: Tensor,
    positions: Tensor,
    variant: ForwardVariant,
    count: int | None = None,
) -> Tensor:
    """The draft of each row as a token of the target, or the `count` likeliest ones.

    A random request's draft is drawn with the very noise that the target will draw the same place with. Where both
    distributions are close, so are their picks: more drafts stand than if the draft took its likeliest token.

    Args:
        head: of the draft.
        hidden_rows: model dtype [R, C]; what the head reads.
        request_rows: int32 [R]; positions: int [R], of the drafted tokens.
        variant: GREEDY when every request is.

    Returns:
        int32 [R]; with `count` [R, count], likeliest first. In graph: yes. Sync: none.
    """
    token_ids = head.vocabulary.target_ids
    if variant is ForwardVariant.GREEDY:
        return head.greedy(hidden_rows) if count is None else token_ids[head(hidden_rows).topk(count).indices]
    logits, params = finite_logits(head(hidden_rows)), rows.gather(request_rows, positions)
    is_greedy = (params.temperature <= 0)[:, None]
    inverse = 1.0 / torch.where(is_greedy, 1.0, params.temperature[:, None])
    noisy = logits * inverse + gumbel_noise(params.seeds, params.positions, token_ids)
    is_kept = logits >= filter_thresholds(logits, inverse, params)
    scores = torch.where(is_greedy, logits, torch.where(is_kept, noisy, -torch.inf))
    return token_ids[scores.argmax(-1) if count is None else scores.topk(count).indices]
