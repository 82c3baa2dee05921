"""Which of a draft's tokens stand: exact for greedy requests, distribution-preserving for random ones.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; Chen et al. 2023,
"Accelerating Large Language Model Decoding with Speculative Sampling".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graphrunner.kernels.noise import MASK_32, UNIT, mix32, row_keys

_ACCEPTANCE_SALT = 0x2545F491


@dataclass(frozen=True, slots=True)
class Accepted:
    """What verification keeps of R linear drafts of K tokens.

    Attributes:
        num_accepted: int32 [R], 0 to K; the bonus token is not counted.
        token_ids: int32 [R, K + 1]; the accepted tokens, then the one the target model adds; -1 after that.
    """

    num_accepted: Tensor
    token_ids: Tensor


def accept_greedy(draft_ids: Tensor, target_ids: Tensor) -> Accepted:
    """Keep the draft as far as the target model would have written the same.

    Args:
        draft_ids: integer [R, K]; -1 where a request has fewer drafts.
        target_ids: integer [R, K + 1]; the target's own choice at each place.

    Sync: none. In graph: yes.
    """
    is_same = draft_ids == target_ids[:, :-1]
    num_accepted = is_same.to(torch.int32).cumprod(dim=1).sum(dim=1)
    return _joined(draft_ids, num_accepted, target_ids.gather(1, num_accepted[:, None]))


def accept_random(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    uniforms: Tensor,
    noise_after: Callable[[Tensor], Tensor],
) -> Accepted:
    """Keep draft token x with probability min(1, p(x) / q(x)); at the first refusal draw from max(p - q, 0).

    Tokens then have exactly the target's distribution, whatever the draft was.

    Args:
        draft_ids: integer [R, K]; -1 where a request has fewer drafts.
        draft_probs: fp32 [R, K, V], what each draft token was drawn from; None when drafts were not drawn at all
            (n-grams), which counts as probability 1.
        target_probs: fp32 [R, K + 1, V], filtered and normalised.
        uniforms: fp32 [R, K], in [0, 1).
        noise_after: num_accepted int [R] -> fp32 [R, V], Gumbel noise of the token that the target adds there.

    Sync: none. In graph: yes.
    """
    num_drafts = draft_ids.shape[1]
    is_draft = draft_ids >= 0
    place = draft_ids.clamp(min=0).to(torch.int64)[:, :, None]
    p = target_probs[:, :num_drafts].gather(2, place)[:, :, 0]
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(2, place)[:, :, 0]
    is_kept = is_draft & (uniforms * q < p)
    num_accepted = is_kept.to(torch.int32).cumprod(dim=1).sum(dim=1)
    at = num_accepted[:, None, None].expand(-1, 1, target_probs.shape[2])
    target = target_probs.gather(1, at)[:, 0]
    residual = (target - _refused_mass(draft_ids, draft_probs, num_accepted, target)).clamp(min=0.0)
    # Where p and q agree up to rounding nothing is left over; the target itself is then as good.
    weights = torch.where(residual.sum(dim=1, keepdim=True) > 0, residual, target)
    added = (weights.log() + noise_after(num_accepted)).argmax(dim=1, keepdim=True)
    return _joined(draft_ids, num_accepted, added)


def acceptance_uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """fp32 [R, K] in [0, 1), from int64 seeds [R] and integer positions [R, K]; independent of the token noise."""
    keys, _ = row_keys(seeds.repeat_interleave(positions.shape[1]), positions.reshape(-1))
    bits = mix32((keys + _ACCEPTANCE_SALT) & MASK_32) >> 8
    return (bits.to(torch.float32) * (UNIT * 256)).view(positions.shape)


def _refused_mass(draft_ids: Tensor, draft_probs: Tensor | None, num_accepted: Tensor, target: Tensor) -> Tensor:
    """q at the place where the draft was refused, fp32 [R, V]; zero where every draft token stood or none was there."""
    num_drafts = draft_ids.shape[1]
    place = num_accepted.clamp(max=max(num_drafts - 1, 0)).to(torch.int64)[:, None]
    refused = draft_ids.gather(1, place)
    is_refused = (num_accepted[:, None] < num_drafts) & (refused >= 0)
    if draft_probs is None:
        q = torch.zeros_like(target).scatter(1, refused.clamp(min=0).to(torch.int64), 1.0)
    else:
        q = draft_probs.gather(1, place[:, :, None].expand(-1, 1, target.shape[1]))[:, 0]
    return torch.where(is_refused, q, 0.0)


def _joined(draft_ids: Tensor, num_accepted: Tensor, added: Tensor) -> Accepted:
    place = torch.arange(draft_ids.shape[1] + 1, device=draft_ids.device)
    padded = torch.nn.functional.pad(draft_ids, (0, 1), value=-1)
    kept = torch.where(place < num_accepted[:, None], padded, -1)
    token_ids = torch.where(place == num_accepted[:, None], added.to(kept.dtype), kept)
    return Accepted(num_accepted.to(torch.int32), token_ids.to(torch.int32))
