"""What a row needs beyond its device parameters: biases, held-back stops, logprobs, a grammar. Most need nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.scheduled_batch import RowInit
from graphrunner.device.transfer import to_device
from graphrunner.sampling.structured_output import GrammarCursor


@dataclass(slots=True)
class RowState:
    """Host record of one request; its tensors are on the device.

    Attributes:
        prompt: token ids.
        bias_ids, bias_values: int64 and fp32 [n]; logit_bias. None without one.
        stop_ids: int64 [n]; what min_tokens holds back. None without it.
        grammar: where the request stands in its grammar. None without one.
        awaited: hands out the token that the grammar has not seen yet; waits for the step that sampled it.
    """

    params: SamplingParams
    prompt: tuple[int, ...]
    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None
    stop_ids: Tensor | None = None
    grammar: GrammarCursor | None = None
    awaited: Callable[[], int] | None = None

    @classmethod
    def of(
        cls, init: RowInit, device: torch.device, eos_token_ids: frozenset[int], grammar: GrammarCursor | None = None
    ) -> RowState | None:
        """The state a request needs; None when its device parameters say it all. Sync: none."""
        params = init.sampling_params
        has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        if not (params.logit_bias or params.min_tokens or has_logprobs or grammar):
            return None
        state = cls(params, init.prompt_token_ids, grammar=grammar)
        if params.logit_bias:
            state.bias_ids = to_device(torch.tensor(list(params.logit_bias), dtype=torch.int64), device)
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
            state.bias_values = to_device(values, device)
        held = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(eos_token_ids))
        if params.min_tokens and held:
            state.stop_ids = to_device(torch.tensor(sorted(held), dtype=torch.int64), device)
        return state

    def adjust(self, logits: Tensor, seq_len: int) -> None:
        """Add the bias and forbid stops that come too early, in place.

        Args:
            logits: fp32 [V], device.
            seq_len: tokens of the sequence so far.
        """
        if self.bias_ids is not None and self.bias_values is not None:
            logits.index_add_(0, self.bias_ids, self.bias_values)
        if self.stop_ids is not None and seq_len - len(self.prompt) < self.params.min_tokens:
            logits.index_fill_(0, self.stop_ids, -torch.inf)

    def catch_up(self) -> GrammarCursor | None:
        """The grammar, after every token sampled so far. Sync: waits for the step before, only with a grammar."""
        if self.grammar is not None and self.awaited is not None:
            self.grammar.advance(self.awaited())
            self.awaited = None
        return self.grammar
