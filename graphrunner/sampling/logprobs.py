"""Logprobs under the raw logits of the model: no temperature, no penalty, no mask.

A row's numbers, and the choice among equal ones, do not depend on the rows beside it or on what those ask for.

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
_ROWS_RANKED_AT_ONCE = 16  # their keys take six times the memory of their logits in bfloat16


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Logprobs of N positions, device.

    Attributes:
        token_ids: int64 [N]; the token that stands there.
        logprobs: fp32 [N].
        ranks: int64 [N]; 1 for the likeliest.
        top_ids: int64 [N, k]; top_logprobs: fp32 [N, k]; best first, of equals the lowest id.
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
    total = log_sums(logits)
    own = logits.gather(1, token_ids[:, None])
    ranks = (logits > own).sum(dim=-1) + 1
    top_ids = torch.cat([_top_ids(rows, num_top) for rows in logits.split(_ROWS_RANKED_AT_ONCE)])
    top = logits.gather(1, top_ids)
    return token_ids, _floored(own - total)[:, 0], ranks, top_ids, _floored(top - total)


def log_sums(logits: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(row))) of each row, fp32 [N, 1] of fp32 [N, V]; -inf for a row of them.

    torch sums one row in other pieces than several: on a GPU, and on a CPU with more than one thread.
    """
    if logits.is_cuda:
        from graphrunner.kernels.triton.sample import row_log_sums

        return row_log_sums(logits.contiguous())[:, None]
    return torch.cat([row.logsumexp(dim=-1, keepdim=True) for row in logits.split(1)])


def _top_ids(logits: torch.Tensor, num_top: int) -> torch.Tensor:
    """int64 [n, num_top] of fp32 [n, V]: the likeliest tokens in order, so that fewer are the first of more.

    torch.topk chooses among equals as it likes, and otherwise for another `num_top`. So each logit becomes an integer
    of its own: its bits in an order that integers have, then its id.
    """
    bits = (logits + 0.0).view(torch.int32)  # and minus zero becomes zero
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(torch.int64)
    keys = (ordered << 32) - torch.arange(logits.shape[1], device=logits.device)
    return -keys.topk(num_top, dim=-1).values & 0xFFFFFFFF


def _floored(logprobs: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(logprobs, nan=LOGPROB_FLOOR).clamp(min=LOGPROB_FLOOR, max=0.0)


def entries_of(copied: Sequence[torch.Tensor], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Host entries from the tensors of `ScoredTokens.start_copy`, each cut to its own `num_top`."""
    token_ids, logprobs, ranks, top_ids, top_logprobs = (tensor.tolist() for tensor in copied)
    entries = []
    for index, count in enumerate(num_top):
        pairs = tuple(zip(top_ids[index][:count], top_logprobs[index][:count], strict=True))
        entries.append(TokenLogprobs(token_ids[index], logprobs[index], ranks[index], pairs))
    return entries
