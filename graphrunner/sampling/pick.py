"""Pure tensor functions that turn logits into tokens: no state, no sync, no branch on data.

Order: temperature, top-k, top-p (over what top-k left), min-p, noise, argmax. A row whose temperature is under
`GREEDY_BELOW` takes the argmax of its raw logits. Among equal logits the lowest token id comes first, everywhere.
NaN counts as minus infinity; a row without one finite logit yields token 0. Every row is computed on its own and all
sums are of integers, so a row's token does not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrunner.kernels.noise import gumbel_noise

GREEDY_BELOW = 1e-5
LOGIT_LIMIT = 1e30
_WEIGHT_SCALE = 2.0**32


@dataclass(frozen=True, slots=True)
class RowParams:
    """What random sampling needs, one entry a row, device.

    Attributes:
        temperature, top_p, min_p: fp32 [R].
        top_k: int32 [R]; 0 keeps all.
        seeds: int64 [R].
        positions: int32 or int64 [R]; index of the token being sampled.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


def finite_logits(logits: torch.Tensor) -> torch.Tensor:
    """fp32 logits without NaN or plus infinity; minus infinity stays. Shape as given."""
    return torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=LOGIT_LIMIT, neginf=-torch.inf)


def pick_greedy(logits: torch.Tensor) -> torch.Tensor:
    """int32 [R]: the likeliest token of each row of [R, V], the lowest id among equals."""
    return finite_logits(logits).argmax(dim=-1).to(torch.int32)


def pick_random(logits: torch.Tensor, params: RowParams, *, has_filters: bool = True) -> torch.Tensor:
    """One token a row.

    Args:
        logits: any float dtype [R, V], device.
        params: greedy rows included.
        has_filters: False promises that no row uses top-k or top-p, which saves the sort.

    Returns:
        int32 [R], device.
    """
    logits = finite_logits(logits)
    is_greedy = (params.temperature < GREEDY_BELOW)[:, None]
    scaled = logits / torch.where(is_greedy, 1.0, params.temperature[:, None])
    top = scaled.amax(dim=-1, keepdim=True).clamp(min=-LOGIT_LIMIT)
    keep = torch.exp(scaled - top) >= params.min_p[:, None]
    if has_filters:
        keep = keep & _kept_by_top_k_top_p(scaled, top, params.top_k, params.top_p)
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    noisy = scaled + gumbel_noise(params.seeds, params.positions, token_ids)
    score = torch.where(is_greedy, logits, torch.where(keep, noisy, -torch.inf))
    return score.argmax(dim=-1).to(torch.int32)


def _kept_by_top_k_top_p(
    scaled: torch.Tensor, top: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """bool [R, V]. The likeliest token is always kept.

    Probabilities are summed as integers (2**32 for the likeliest token), because a float sum would depend on how a
    device splits it.
    """
    ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    is_kept = (rank < top_k[:, None]) | (top_k[:, None] <= 0)
    weights = (torch.exp(ordered - top) * _WEIGHT_SCALE).to(torch.int64) * is_kept
    before = weights.cumsum(dim=-1) - weights
    budget = top_p.double()[:, None] * weights.sum(dim=-1, keepdim=True).double()
    is_kept = is_kept & ((before.double() < budget) | (top_p[:, None] >= 1.0))
    is_kept = is_kept | (rank == 0)
    return torch.zeros_like(is_kept).scatter(1, order, is_kept)
