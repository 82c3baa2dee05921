"""Logprobs under the raw logits of the model: no temperature, no penalty, no mask.

Probabilities too small for fp32, and tokens that the model itself rules out, are reported as `LOGPROB_FLOOR`, so that
the numbers stay finite in JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from graphrunner.core.outputs import TokenLogprobs
from graphrunner.sampling.pick import finite_logits
from graphrunner.sampling.sampled_tokens import HostCopy

LOGPROB_FLOOR = -9999.0
_ROWS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Logprobs of N positions, device.

    Attributes:
        token_ids: int64 [N]; the token that stands there.
        logprobs: fp32 [N].
        ranks: int64 [N]; 1 for the likeliest.
        top_ids: int64 [N, k]; top_logprobs: fp32 [N, k]; best first.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def start_copy(self) -> HostCopy:
        """Begin to bring everything to the host; for `entries_of`."""
        return HostCopy(self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)


def score_tokens(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> ScoredTokens:
    """Score one token a row.

    Args:
        logits: [N, V], any float dtype; raw.
        token_ids: integer [N].
        num_top: how many of the likeliest tokens to list.
    """
    return score_blocks(logits.split(_ROWS_AT_ONCE), token_ids.split(_ROWS_AT_ONCE), num_top)


def score_blocks(logits: Iterable[torch.Tensor], token_ids: Iterable[torch.Tensor], num_top: int) -> ScoredTokens:
    """As `score_tokens`, block by block; no more than one block of logits need be there at once."""
    parts = [_score_block(block, ids.to(torch.int64), num_top) for block, ids in zip(logits, token_ids, strict=True)]
    return ScoredTokens(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _score_block(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    num_top = min(num_top, logits.shape[-1])
    logits = finite_logits(logits)
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, token_ids[:, None])
    ranks = (logits > own).sum(dim=-1) + 1
    top, top_ids = logits.topk(num_top, dim=-1)
    return token_ids, _floored(own - total)[:, 0], ranks, top_ids, _floored(top - total)


def _floored(logprobs: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(logprobs, nan=LOGPROB_FLOOR).clamp(min=LOGPROB_FLOOR, max=0.0)


def entries_of(copied: Sequence[torch.Tensor], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Host entries from the tensors of `ScoredTokens.start_copy`, each cut to its own `num_top`."""
    token_ids, logprobs, ranks, top_ids, top_logprobs = (tensor.tolist() for tensor in copied)
    entries = []
    for index, count in enumerate(num_top):
        pairs = sorted(zip(top_ids[index], top_logprobs[index], strict=True), key=lambda pair: (-pair[1], pair[0]))
        entries.append(TokenLogprobs(token_ids[index], logprobs[index], ranks[index], tuple(pairs[:count])))
    return entries
