"""Logprobs in the two shapes that OpenAI has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from graphrunner.core.outputs import Logprob
from graphrunner.entrypoints.openai.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

LOGPROB_FLOOR = -9999.0
"""Stands for minus infinity, which JSON does not have."""

Position = Mapping[int, Logprob] | None


def chat_logprobs(token_ids: Sequence[int], positions: Sequence[Position], num_top: int) -> ChatLogprobs:
    """One entry a token, each with its `num_top` likeliest tokens, best first."""
    content: list[TokenLogprob] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        entries = position or {}
        chosen = entries.get(token_id, Logprob(LOGPROB_FLOOR))
        token = chosen.decoded_token or ""
        top = [
            TopLogprob(text, value, list(text.encode("utf-8", "replace")))
            for text, value in ((each.decoded_token or "", _finite(each.logprob)) for each in _top(entries, num_top))
        ]
        content.append(TokenLogprob(token, _finite(chosen.logprob), list(token.encode("utf-8", "replace")), top))
    return ChatLogprobs(content)


def completion_logprobs(
    token_ids: Sequence[int], positions: Sequence[Position], num_top: int, offset: int, first_text: str = ""
) -> CompletionLogprobs:
    """Parallel lists; `offset` is where the first token starts in the text.

    A prompt's first token has no logprob, and its text comes as `first_text`.
    """
    shaped = CompletionLogprobs([], [], [], [])
    for token_id, position in zip(token_ids, positions, strict=True):
        chosen = None if position is None else position.get(token_id)
        token = first_text if chosen is None else chosen.decoded_token or ""
        shaped.tokens.append(token)
        shaped.token_logprobs.append(None if chosen is None else _finite(chosen.logprob))
        top = {each.decoded_token or "": _finite(each.logprob) for each in _top(position or {}, num_top)}
        shaped.top_logprobs.append(top if num_top and position is not None else None)
        shaped.text_offset.append(offset)
        offset += len(token)
    return shaped


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Logprobs of one text from those of its pieces."""
    whole = CompletionLogprobs([], [], [], [])
    for part in parts:
        whole.tokens += part.tokens
        whole.token_logprobs += part.token_logprobs
        whole.top_logprobs += part.top_logprobs
        whole.text_offset += part.text_offset
    return whole


def _top(entries: Mapping[int, Logprob], num_top: int) -> list[Logprob]:
    return sorted(entries.values(), key=lambda each: -_finite(each.logprob))[:num_top]


def _finite(value: float) -> float:
    return max(value, LOGPROB_FLOOR) if math.isfinite(value) else LOGPROB_FLOOR
