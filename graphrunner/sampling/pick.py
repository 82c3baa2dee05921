"""Pure tensor functions that turn logits into tokens: no state, no sync, no branch on data.

Order: temperature, top-k, top-p (over what top-k left), min-p, noise, argmax. A filter is a smallest logit that is
kept; tokens that tie with it are kept too. A row with temperature 0 takes the argmax of its raw logits, the lowest
token id among equals. NaN counts as minus infinity; a row without one finite logit yields token 0. Every row is
computed on its own and probabilities are summed as integers, so a row's token does not depend on the rows beside it.
Same tokens: pick_on_host.py (CPU), kernels/triton/sample.py (CUDA).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphrunner.kernels.noise import gumbel_noise

LOGIT_LIMIT = 1e30
WEIGHT_SCALE = 2.0**32


@dataclass(frozen=True, slots=True)
class RowParams:
    """What random sampling needs, one entry a row, device.

    Attributes:
        temperature: fp32 [R]; 0 is greedy.
        top_p, min_p: fp32 [R]; 1 and 0 keep all.
        top_k: int32 [R]; 0 keeps all.
        seeds: int64 [R].
        positions: int32 or int64 [R]; index of the token being sampled.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor


def finite_logits(logits: Tensor) -> Tensor:
    """fp32 logits without NaN or plus infinity; minus infinity stays. Shape as given."""
    return torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=LOGIT_LIMIT, neginf=-torch.inf)


def pick_greedy(logits: Tensor) -> Tensor:
    """int32 [R]: the likeliest token of each row of [R, V], the lowest id among equals."""
    return finite_logits(logits).argmax(dim=-1).to(torch.int32)


def pick_random(logits: Tensor, params: RowParams) -> Tensor:
    """One token a row.

    Args:
        logits: any float dtype [R, V], device.
        params: greedy rows included.

    Returns:
        int32 [R], device.
    """
    logits = finite_logits(logits)
    is_greedy = (params.temperature <= 0)[:, None]
    inverse = 1.0 / torch.where(is_greedy, 1.0, params.temperature[:, None])
    keep = logits >= filter_thresholds(logits, inverse, params)
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    noisy = logits * inverse + gumbel_noise(params.seeds, params.positions, token_ids)
    score = torch.where(is_greedy, logits, torch.where(keep, noisy, -torch.inf))
    return score.argmax(dim=-1).to(torch.int32)


def target_probs(logits: Tensor, params: RowParams) -> Tensor:
    """What `pick_random` draws from: fp32 [R, V], each row filtered and normalised; a greedy row has one certain token.

    Args:
        logits: any float dtype [R, V], device.
        params: `seeds` and `positions` are not used.
    """
    logits = finite_logits(logits)
    is_greedy = (params.temperature <= 0)[:, None]
    inverse = 1.0 / torch.where(is_greedy, 1.0, params.temperature[:, None])
    keep = logits >= filter_thresholds(logits, inverse, params)
    probs = torch.where(keep, logits * inverse, -torch.inf).softmax(dim=-1)
    certain = torch.zeros_like(probs).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    # A row without one finite logit yields token 0, as everywhere.
    return torch.where(is_greedy | probs.isnan(), certain, probs)


def filter_thresholds(logits: Tensor, inverse_temperature: Tensor, params: RowParams) -> Tensor:
    """The smallest logit that top-k, top-p and min-p keep in each row.

    Args:
        logits: fp32 [R, V], finite or minus infinity.
        inverse_temperature: fp32 [R, 1].

    Returns:
        fp32 [R, 1]; never above the row's largest logit.
    """
    ordered = torch.sort(logits, dim=-1, descending=True).values
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    top_k, top_p = params.top_k[:, None], params.top_p[:, None]
    top = ordered[:, :1].clamp(min=-LOGIT_LIMIT)
    is_kept = (rank < top_k) | (top_k <= 0)
    shares = torch.exp((ordered - top) * inverse_temperature)
    weights = (shares * WEIGHT_SCALE).to(torch.int64) * is_kept
    before = weights.cumsum(dim=-1) - weights
    budget = top_p.double() * weights.sum(dim=-1, keepdim=True).double()
    is_kept = is_kept & ((before.double() < budget) | (top_p >= 1.0)) & (shares >= params.min_p[:, None])
    num_kept = is_kept.sum(dim=-1, keepdim=True).clamp(min=1)
    return ordered.gather(1, num_kept - 1)
