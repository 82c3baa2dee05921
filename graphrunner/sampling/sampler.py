"""Picks tokens: parameters live in device rows, noise is a pure function of (seed, position, token)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphrunner.core.outputs import ModelOutput, TokenLogprobs
from graphrunner.core.scheduled_batch import RowInit, ScheduledBatch
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.kernels.noise import gumbel_noise
from graphrunner.sampling.filters import scale_and_filter
from graphrunner.sampling.logprobs import prompt_logprobs, token_logprobs
from graphrunner.sampling.row_state import RowState, apply_row_state


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens on their way to the host; a `TokenHandle`.

    Attributes:
        token_ids: int32 [num_sampled], device.
    """

    token_ids: Tensor

    def wait(self) -> list[int]:
        """See `TokenHandle.wait`."""
        return self.token_ids.tolist()


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """What sampling adds to a step; columns have one entry a request."""

    tokens: SampledTokens
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprobs, ...]] | None, ...] = ()


class Sampler:
    """Per-row parameters on the device, and the two ways to sample with them.

    Args:
        vocab_size: of the model.
        num_rows: max_num_seqs + 1; row 0 is the dummy and greedy.
        device: where logits are.
    """

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self._temperature = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._top_p = torch.ones(num_rows, dtype=torch.float32, device=device)
        self._min_p = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._seed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._token_range = torch.arange(vocab_size, dtype=torch.int64, device=device)
        self._states: dict[int, RowState] = {}
        self._random_rows: set[int] = set()

    def apply(self, batch: ScheduledBatch, eos_token_ids: frozenset[int] = frozenset()) -> None:
        """Take in new rows. No work in a steady step."""
        for init in batch.row_inits:
            self._put_row(init, eos_token_ids)

    def sample_in_graph(
        self, logits: Tensor, request_rows: Tensor, seq_lens: Tensor, variant: ForwardVariant
    ) -> Tensor:
        """Pick one token a row from device state alone.

        Args:
            logits: float32 [R, V]; request_rows: int32 [R]; seq_lens: int32 [R].

        Returns:
            int32 [R]. In graph: yes. Sync: none.
        """
        if variant is ForwardVariant.GREEDY:
            return torch.argmax(logits, dim=-1).to(torch.int32)
        temperature = self._temperature.index_select(0, request_rows)
        kept = scale_and_filter(
            logits,
            temperature,
            self._top_k.index_select(0, request_rows),
            self._top_p.index_select(0, request_rows),
            self._min_p.index_select(0, request_rows),
        )
        noise = gumbel_noise(self._seed.index_select(0, request_rows), seq_lens, self._token_range)
        drawn = torch.argmax(kept + noise, dim=-1)
        return torch.where(temperature > 0, drawn, torch.argmax(logits, dim=-1)).to(torch.int32)

    def sample(self, output: ModelOutput, batch: ScheduledBatch) -> SampledBatch:
        """Tokens of the rows that sample, and the logprobs that were asked for.

        Sync: only when some row has penalties or wants logprobs.
        """
        sampled = [index for index, samples in enumerate(batch.samples) if samples]
        if output.token_ids is not None:
            return SampledBatch(SampledTokens(_rows(output.token_ids, sampled, batch.num_reqs)))
        assert output.logits is not None
        raw = output.logits.float()
        prompts = self._prompt_logprobs(raw, batch) if batch.needs_all_logits else ()
        if raw.shape[0] != batch.num_reqs:
            ends = torch.tensor(batch.query_lens, device=self._device).cumsum(0) - 1
            raw = raw.index_select(0, ends)
        raw = _rows(raw, sampled, batch.num_reqs)
        if not sampled:
            return SampledBatch(SampledTokens(torch.zeros(0, dtype=torch.int32)), (), prompts)
        rows = [batch.rows[index] for index in sampled]
        seq_lens = [batch.cached_lens[index] + batch.query_lens[index] for index in sampled]
        states = [self._states.get(row) for row in rows]
        logits = apply_row_state(raw, states) if any(states) else raw
        variant = ForwardVariant.SAMPLE if self._is_any_random(rows) else ForwardVariant.GREEDY
        device_rows = torch.tensor(rows, dtype=torch.int32, device=self._device)
        lengths = torch.tensor(seq_lens, dtype=torch.int32, device=self._device)
        token_ids = self.sample_in_graph(logits, device_rows, lengths, variant)
        logprobs = self._after(batch, sampled, states, token_ids, raw)
        return SampledBatch(SampledTokens(token_ids), logprobs, prompts)

    def _after(
        self, batch: ScheduledBatch, sampled: list[int], states: list[RowState | None], token_ids: Tensor, raw: Tensor
    ) -> tuple[TokenLogprobs | None, ...]:
        """Let penalties know the tokens; logprobs by request, empty when nobody asked."""
        if not any(states):
            return ()
        columns: list[TokenLogprobs | None] = [None] * batch.num_reqs
        for place, (index, state, token) in enumerate(zip(sampled, states, token_ids.tolist(), strict=True)):
            if state is None:
                continue
            state.add_output(token)
            if state.num_logprobs is not None:
                columns[index] = token_logprobs(raw[place], token, state.num_logprobs)
        return tuple(columns)

    def _prompt_logprobs(
        self, logits: Tensor, batch: ScheduledBatch
    ) -> tuple[tuple[int, tuple[TokenLogprobs, ...]] | None, ...]:
        columns: list[tuple[int, tuple[TokenLogprobs, ...]] | None] = []
        start = 0
        for row, cached_len, query_len in zip(batch.rows, batch.cached_lens, batch.query_lens, strict=True):
            state = self._states.get(row)
            if state is None or state.num_prompt_logprobs is None:
                columns.append(None)
            else:
                rows = logits[start : start + query_len]
                columns.append(prompt_logprobs(rows, state.prompt, cached_len, state.num_prompt_logprobs))
            start += query_len
        return tuple(columns)

    def _is_any_random(self, rows: list[int]) -> bool:
        return any(row in self._random_rows for row in rows)

    def _put_row(self, init: RowInit, eos_token_ids: frozenset[int]) -> None:
        params, row = init.sampling_params, init.row
        self._temperature[row] = params.temperature
        self._top_k[row] = max(params.top_k, 0)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = init.seed
        if params.is_greedy:
            self._random_rows.discard(row)
        else:
            self._random_rows.add(row)
        state = RowState.of(init, self.vocab_size, self._device, eos_token_ids)
        if state is None:
            self._states.pop(row, None)
        else:
            self._states[row] = state


def _rows(tensor: Tensor, wanted: list[int], count: int) -> Tensor:
    """The wanted rows; the tensor itself when that is all of them."""
    if len(wanted) == count:
        return tensor[:count]
    return tensor.index_select(0, torch.tensor(wanted, dtype=torch.int64, device=tensor.device))
