"""What a row needs beyond its device parameters: earlier tokens, biases, logprobs. Most rows need nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.scheduled_batch import RowInit


@dataclass(slots=True)
class RowState:
    """State of one request.

    Attributes:
        is_in_prompt: bool [V], device. Only with penalties; else None.
        counts: float32 [V], device; how often each token was generated. Only with penalties; else None.
        bias: float32 [V], device; logit_bias. None without one.
        stop_ids: what min_tokens holds back.
        num_outputs: tokens generated so far.
    """

    params: SamplingParams
    prompt: tuple[int, ...]
    num_outputs: int
    stop_ids: Tensor | None
    is_in_prompt: Tensor | None
    counts: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, init: RowInit, vocab_size: int, device: torch.device, eos_token_ids: frozenset[int]) -> RowState | None:
        """The state a request needs; None when its device parameters say it all."""
        params = init.sampling_params
        has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        if not (params.has_penalties or params.logit_bias or params.min_tokens or has_logprobs):
            return None
        is_in_prompt = counts = bias = stop_ids = None
        if params.has_penalties:
            is_in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            is_in_prompt[list(init.prompt_token_ids)] = True
            counts = torch.zeros(vocab_size, device=device)
            for token_id in init.output_token_ids:
                counts[token_id] += 1
        if params.logit_bias:
            bias = torch.zeros(vocab_size, device=device)
            bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()), device=device)
        if params.min_tokens:
            held = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(eos_token_ids))
            stop_ids = torch.tensor(sorted(held), dtype=torch.int64, device=device)
        return cls(params, init.prompt_token_ids, len(init.output_token_ids), stop_ids, is_in_prompt, counts, bias)

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens each output reports; None for no report."""
        return self.params.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for prompt tokens."""
        return self.params.prompt_logprobs

    def add_output(self, token_id: int) -> None:
        """Count a generated token."""
        self.num_outputs += 1
        if self.counts is not None:
            self.counts[token_id] += 1


def apply_row_state(logits: Tensor, states: list[RowState | None]) -> Tensor:
    """Logits with each row's bias, penalties and held-back stops in place.

    Args:
        logits: float32 [R, V]; not changed.

    Returns:
        float32 [R, V].
    """
    changed = logits.clone()
    for row, state in enumerate(states):
        if state is not None:
            _apply(changed[row], state)
    return changed


def _apply(logits: Tensor, state: RowState) -> None:
    """In place, one row [V]. Order: bias, repetition, frequency and presence, then what may not come yet."""
    params = state.params
    if state.bias is not None:
        logits += state.bias
    if state.counts is not None and state.is_in_prompt is not None:
        is_generated = state.counts > 0
        if params.repetition_penalty != 1.0:
            penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits.copy_(torch.where(is_generated | state.is_in_prompt, penalised, logits))
        logits -= params.frequency_penalty * state.counts + params.presence_penalty * is_generated
    if state.stop_ids is not None and state.num_outputs < params.min_tokens:
        logits[state.stop_ids] = -torch.inf
