"""Picks tokens: parameters live in device rows, noise is a pure function of (seed, position, token)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphrunner.core.outputs import ModelOutput, TokenLogprobs
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.sampling.logprobs import entries_of, score_tokens
from graphrunner.sampling.pick import pick_greedy, pick_random
from graphrunner.sampling.row_state import RowState, apply_row_state
from graphrunner.sampling.rows import SamplingRows
from graphrunner.sampling.sampled_tokens import SampledTokens

PromptEntries = tuple[int, tuple[TokenLogprobs, ...]]


class Sampler:
    """Per-row parameters on the device, and the two ways to sample with them.

    Args:
        vocab_size: of the model.
        num_rows: max_num_seqs + 1; row 0 is the dummy and greedy.
        device: where logits are.
    """

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.rows = SamplingRows(num_rows, device)
        self._device = device
        self._states: dict[int, RowState] = {}
        self._random_rows: set[int] = set()

    def apply(self, batch: ScheduledBatch, eos_token_ids: frozenset[int] = frozenset()) -> None:
        """Take in new rows. No work in a steady step."""
        if not batch.row_inits:
            return
        self.rows.write(batch.row_inits)
        for init in batch.row_inits:
            (self._random_rows.discard if init.sampling_params.is_greedy else self._random_rows.add)(init.row)
            state = RowState.of(init, self.vocab_size, self._device, eos_token_ids)
            if state is None:
                self._states.pop(init.row, None)
            else:
                self._states[init.row] = state

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
            return pick_greedy(logits)
        return pick_random(logits, self.rows.gather(request_rows, seq_lens))

    def sample(self, output: ModelOutput, batch: ScheduledBatch) -> SampledTokens:
        """Tokens of the rows that sample, and the logprobs that were asked for.

        Sync: only when some row has penalties or wants logprobs.
        """
        sampled = [index for index, samples in enumerate(batch.samples) if samples]
        if output.token_ids is not None:
            return SampledTokens(output.token_ids, sampled)
        assert output.logits is not None
        logits = output.logits
        prompts = self._prompt_logprobs(logits, batch) if batch.needs_all_logits else ()
        if logits.shape[0] != batch.num_reqs:
            logits = logits.index_select(0, self._indices(batch.query_lens).cumsum(0) - 1)
        if len(sampled) != batch.num_reqs:
            logits = logits.index_select(0, self._indices(sampled))
        if not sampled:
            return SampledTokens(torch.zeros(0, dtype=torch.int32), None, (), prompts)
        rows = [batch.rows[index] for index in sampled]
        states = [self._states.get(row) for row in rows]
        shaped = apply_row_state(logits.float(), states) if any(states) else logits
        is_random = any(row in self._random_rows for row in rows)
        lengths = self._indices([batch.cached_lens[index] + batch.query_lens[index] for index in sampled])
        variant = ForwardVariant.SAMPLE if is_random else ForwardVariant.GREEDY
        token_ids = self.sample_in_graph(shaped, self._indices(rows), lengths, variant)
        logprobs = self._after(batch, sampled, states, token_ids, logits) if any(states) else ()
        return SampledTokens(token_ids, None, logprobs, prompts)

    def _after(
        self, batch: ScheduledBatch, sampled: list[int], states: list[RowState | None], token_ids: Tensor, raw: Tensor
    ) -> tuple[TokenLogprobs | None, ...]:
        """Let penalties know the tokens; logprobs by request, empty when nobody asked. Sync: yes."""
        for state, token in zip(states, token_ids.tolist(), strict=True):
            if state is not None:
                state.add_output(token)
        places = [p for p, state in enumerate(states) if state is not None and state.num_logprobs is not None]
        if not places:
            return ()
        wanted = [state.num_logprobs or 0 for state in states if state is not None and state.num_logprobs is not None]
        index = self._indices(places)
        scored = score_tokens(raw.index_select(0, index), token_ids.index_select(0, index), max(wanted))
        columns: list[TokenLogprobs | None] = [None] * batch.num_reqs
        for place, entry in zip(places, entries_of(scored.start_copy().wait(), wanted), strict=True):
            columns[sampled[place]] = entry
        return tuple(columns)

    def _prompt_logprobs(self, logits: Tensor, batch: ScheduledBatch) -> tuple[PromptEntries | None, ...]:
        """Row i of a chunk scores the prompt token after it; the chunk's first scored position comes along."""
        columns: list[PromptEntries | None] = []
        start = 0
        for row, cached_len, query_len in zip(batch.rows, batch.cached_lens, batch.query_lens, strict=True):
            state = self._states.get(row)
            num_top = state.num_prompt_logprobs if state is not None else None
            targets = state.prompt[cached_len + 1 : cached_len + query_len + 1] if state is not None else ()
            if num_top is None or not targets:
                columns.append(None)
            else:
                scored = score_tokens(logits[start : start + len(targets)], self._indices(targets), num_top)
                entries = entries_of(scored.start_copy().wait(), [num_top] * len(targets))
                columns.append((cached_len + 1, tuple(entries)))
            start += query_len
        return tuple(columns)

    def _indices(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
