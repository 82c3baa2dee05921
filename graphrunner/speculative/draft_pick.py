"""Which tokens a draft says, inside a recording.

A random request's draft is drawn with the very noise that the target will draw the same place with. Where both
distributions are close, so are their picks: more drafts stand than if the draft took its likeliest token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphrunner.core.shape_key import ForwardVariant
from graphrunner.kernels.noise import gumbel_noise
from graphrunner.kernels.tracing import has_gpu_kernels
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
) -> Tensor:
    """The draft of each row as a token of the target.

    Args:
        head: of the draft.
        hidden_rows: model dtype [R, C]; what the head reads.
        request_rows: int32 [R]; positions: int [R], of the drafted tokens.
        variant: GREEDY when every request is.

    Returns:
        int32 [R]. In graph: yes. Sync: none.
    """
    if variant is ForwardVariant.GREEDY:
        return head.greedy(hidden_rows)
    scores = _noisy(head.scores(hidden_rows), head.vocabulary.target_ids, rows, request_rows, positions)
    if has_gpu_kernels(scores):
        from graphrunner.kernels.triton import gpu_ops

        return gpu_ops.greedy_tokens(scores, head.vocabulary.target_ids)
    return head.vocabulary.to_target(scores.argmax(-1))


def best_drafts(
    head: DraftHead,
    hidden_rows: Tensor,
    *,
    rows: SamplingRows,
    request_rows: Tensor,
    positions: Tensor,
    variant: ForwardVariant,
    count: int,
) -> tuple[Tensor, Tensor]:
    """The `count` likeliest drafts of each row, likeliest first, and the log of their chances; see `pick_drafts`.

    The chances of a random request's drafts are those among the noisy scores: how clearly each wins.

    Returns:
        int32 [R, count], fp32 [R, count]. In graph: yes. Sync: none.
    """
    scores = head.scores(hidden_rows)
    if variant is not ForwardVariant.GREEDY:
        scores = _noisy(scores, head.vocabulary.target_ids, rows, request_rows, positions)
    if has_gpu_kernels(scores):
        from graphrunner.kernels.triton import likeliest

        return likeliest.top_tokens(scores, count, head.vocabulary.target_ids)
    scores = scores.float()
    best = scores.topk(count)
    return head.vocabulary.to_target(best.indices), best.values - scores.logsumexp(-1, keepdim=True)


def _noisy(logits: Tensor, token_ids: Tensor, rows: SamplingRows, request_rows: Tensor, positions: Tensor) -> Tensor:
    """fp32 [R, W] of raw logits: filtered, with each request's noise in them; a greedy request's as they are."""
    params = rows.gather(request_rows, positions)
    if has_gpu_kernels(logits):
        from graphrunner.kernels.triton import gpu_ops, likeliest

        gathered = gpu_ops.SamplingRows(params.temperature, params.top_k, params.top_p, params.min_p, params.seeds)
        return likeliest.noisy_scores(logits, token_ids, gathered, positions)
    logits = finite_logits(logits)
    is_greedy = (params.temperature <= 0)[:, None]
    inverse = 1.0 / torch.where(is_greedy, 1.0, params.temperature[:, None])
    noisy = logits * inverse + gumbel_noise(params.seeds, params.positions, token_ids)
    is_kept = logits >= filter_thresholds(logits, inverse, params)
    return torch.where(is_greedy, logits, torch.where(is_kept, noisy, -torch.inf))
