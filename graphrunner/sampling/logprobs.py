"""Logprobs of sampled and of prompt tokens, from the raw logits."""

from __future__ import annotations

import torch
from torch import Tensor

from graphrunner.core.outputs import TokenLogprobs


def token_logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Of one position.

    Args:
        logits: float32 [V], before temperature and penalties.
        num_top: how many of the likeliest to report.
    """
    return _entries(logits.unsqueeze(0), [token_id], num_top)[0]


def prompt_logprobs(
    logits: Tensor, prompt: tuple[int, ...], cached_len: int, num_top: int
) -> tuple[int, tuple[TokenLogprobs, ...]]:
    """Of the prompt tokens that a chunk's logits score: row i scores token cached_len + i + 1.

    Args:
        logits: float32 [query_len, V] of tokens [cached_len, cached_len + query_len).

    Returns:
        The first scored position and one entry a scored prompt token.
    """
    first = cached_len + 1
    targets = list(prompt[first : cached_len + logits.shape[0] + 1])
    return first, tuple(_entries(logits[: len(targets)], targets, num_top)) if targets else ()


def _entries(logits: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=1) + 1
    values, ids = torch.topk(logprobs, num_top, dim=-1) if num_top else (logprobs[:, :0], logprobs[:, :0].long())
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(top_ids, top_values, strict=True)))
        for token_id, logprob, rank, top_ids, top_values in zip(
            token_ids, chosen[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    ]
