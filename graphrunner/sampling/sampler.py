"""Picks tokens: parameters live in device rows, noise is a pure function of (seed, position, token).

The order of what changes logits: penalties, logit_bias, min_tokens, grammar; then `pick.py`. Logprobs are of the raw
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.outputs import ModelOutput, TokenLogprobs
from graphrunner.core.scheduled_batch import RowInit, ScheduledBatch
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.device.transfer import to_device
from graphrunner.kernels.tracing import has_gpu_kernels
from graphrunner.sampling.logprobs import entries_of, score_blocks, score_tokens
from graphrunner.sampling.penalties import PenaltyState
from graphrunner.sampling.pick import finite_logits, pick_greedy, pick_random
from graphrunner.sampling.pick_on_host import pick_random_on_host
from graphrunner.sampling.readback import TokenReadback
from graphrunner.sampling.row_state import RowState
from graphrunner.sampling.rows import SamplingRows
from graphrunner.sampling.sampled_tokens import LazyEntries, SampledTokens
from graphrunner.sampling.structured_output import (
    GrammarCursor,
    StructuredOutputCompiler,
    allowed_mask,
    forbid_others,
)

PromptEntries = tuple[int, tuple[TokenLogprobs, ...]]

_MIN_SCORED_ROWS, _MAX_SCORED_ROWS = 32, 256


class Sampler:
    """Per-row parameters on the device, and the two ways to sample with them.

    Args:
        vocab_size: of the model.
        num_rows: max_num_seqs + 1; row 0 is the dummy and greedy.
        device: where logits are.
        structured: compiles grammars; None refuses requests that need one.

    Attributes:
        readback: brings tokens to the host.
        logits_of: model dtype [n, hidden_size] -> float [n, V], the model's head, for prompt logprobs; set once there
            is a model.
    """

    def __init__(
        self,
        vocab_size: int,
        num_rows: int,
        device: torch.device | str,
        structured: StructuredOutputCompiler | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.rows = SamplingRows(num_rows, device)
        self._device = torch.device(device)
        self.readback = TokenReadback(self._device)
        self._structured = structured
        self._states: dict[int, RowState] = {}
        self._random_rows: set[int] = set()
        self._penalties = PenaltyState(vocab_size, self._device)
        # No more rows at once than a step may sample, which is what memory is planned for.
        self._num_scored_rows = max(_MIN_SCORED_ROWS, min(_MAX_SCORED_ROWS, num_rows - 1))
        self.logits_of: Callable[[Tensor], Tensor] = _no_head

    def apply(self, batch: ScheduledBatch, eos_token_ids: frozenset[int] = frozenset()) -> None:
        """Take in new and resumed rows. No work in a steady step. Sync: none.

        Raises:
            InvalidRequestError: a grammar that cannot be compiled; the door should have refused it.
        """
        if not batch.row_inits:
            return
        self.rows.write(batch.row_inits)
        for init in batch.row_inits:
            self._start(init, eos_token_ids)

    def _start(self, init: RowInit, eos_token_ids: frozenset[int]) -> None:
        params = init.sampling_params
        (self._random_rows.discard if params.is_greedy else self._random_rows.add)(init.row)
        if params.has_penalties:
            self._penalties.start(init)
        else:
            self._penalties.release(init.row)
        state = RowState.of(init, self._device, eos_token_ids, self._cursor_of(init))
        if state is None:
            self._states.pop(init.row, None)
        else:
            self._states[init.row] = state

    def _cursor_of(self, init: RowInit) -> GrammarCursor | None:
        shape = init.sampling_params.structured_output
        if shape is None:
            return None
        if self._structured is None:
            raise InvalidRequestError("structured_output", shape, "the engine has no tokenizer to build grammars from")
        return self._structured.cursor(shape, init.output_token_ids)

    def sample_in_graph(
        self, logits: Tensor, request_rows: Tensor, seq_lens: Tensor, variant: ForwardVariant
    ) -> Tensor:
        """Pick one token a row from device state alone.

        Args:
            logits: float [R, V]; request_rows: int32 [R]; seq_lens: int32 [R], the position of the new token.

        Returns:
            int32 [R]. In graph: yes. Sync: none.
        """
        if variant is ForwardVariant.GREEDY and not has_gpu_kernels(logits):
            return pick_greedy(logits)
        if logits.is_cuda:
            return self._sample_on_cuda(logits, request_rows, seq_lens, variant)
        params = self.rows.gather(request_rows, seq_lens)
        if torch.compiler.is_compiling():
            return pick_random(logits, params)
        return pick_random_on_host(logits, params)

    def _sample_on_cuda(
        self, logits: Tensor, request_rows: Tensor, seq_lens: Tensor, variant: ForwardVariant
    ) -> Tensor:
        from graphrunner.kernels.triton import sample

        logits = logits.contiguous()
        if variant is ForwardVariant.GREEDY:
            return sample.greedy_tokens(logits)
        params = self.rows.gather(request_rows, seq_lens)
        rows = sample.SamplingRows(params.temperature, params.top_k, params.top_p, params.min_p, params.seeds)
        return sample.sample_tokens(logits, rows, seq_lens)

    def sample(self, output: ModelOutput, batch: ScheduledBatch) -> SampledTokens:
        """Tokens of the rows that sample, and the logprobs that were asked for.

        Sync: none, but a row with a grammar waits for its own token of the step before.
        """
        sampled = [index for index, samples in enumerate(batch.samples) if samples]
        if output.token_ids is not None:
            return SampledTokens(output.token_ids, self.readback.start(output.token_ids), sampled)
        assert output.logits is not None
        prompts: Sequence[PromptEntries | None] = ()
        if batch.needs_all_logits:
            assert output.hidden_states is not None, "every runner but the eager one refuses such a batch"
            prompts = self._prompt_logprobs(output.hidden_states, batch)
        if not sampled:
            nothing = torch.zeros(0, dtype=torch.int32, device=self._device)
            return SampledTokens(nothing, self.readback.start(nothing), None, (), prompts)
        rows = [batch.rows[index] for index in sampled]
        lengths = [batch.cached_lens[index] + batch.query_lens[index] for index in sampled]
        logits = self._picked_logits(output.logits, batch, sampled)
        shaped = self.shaped(logits, rows, lengths)
        variant = ForwardVariant.SAMPLE if self.is_random(rows) else ForwardVariant.GREEDY
        staged = self._indices([*rows, *lengths])
        token_ids = self.sample_in_graph(shaped, staged[: len(rows)], staged[len(rows) :], variant)
        self.count(rows, token_ids)
        copy = self.readback.start(token_ids)
        tokens = SampledTokens(token_ids, copy, None, self._logprobs(batch, sampled, logits, token_ids), prompts)
        self.await_grammars(rows, lambda place: tokens.wait()[place])
        return tokens

    def is_random(self, rows: Iterable[int]) -> bool:
        """Whether any of the rows draws its tokens."""
        return any(row in self._random_rows for row in rows)

    def num_logprobs(self, row: int) -> int | None:
        """How many of the likeliest tokens the row's request wants listed; None for no logprobs."""
        state = self._states.get(row)
        return None if state is None else state.params.logprobs

    def await_grammars(self, rows: Sequence[int], token_of: Callable[[int], int]) -> None:
        """Remember, for rows with a grammar, who hands out their new token: a function of the place in `rows`."""
        for place, row in enumerate(rows):
            state = self._states.get(row)
            if state is not None and state.grammar is not None:
                state.awaited = partial(token_of, place)

    def _picked_logits(self, logits: Tensor, batch: ScheduledBatch, sampled: list[int]) -> Tensor:
        """The sampled requests' rows of logits that came one a request."""
        if len(sampled) != batch.num_reqs:
            return logits.index_select(0, self._indices(sampled))
        return logits[: batch.num_reqs]

    def shaped(
        self, logits: Tensor, rows: Sequence[int], lengths: Sequence[int], *, with_grammars: bool = True
    ) -> Tensor:
        """Logits with penalties, biases, held-back stops and grammars in them; a new tensor where any applies.

        Args:
            logits: float [n, V]; one row each.
            lengths: tokens before the one to be picked.
        """
        places = [(place, state) for place, row in enumerate(rows) if (state := self._states.get(row)) is not None]
        adjusted = [(p, s) for p, s in places if s.bias_ids is not None or s.stop_ids is not None]
        with_grammar = [(p, s.catch_up()) for p, s in places if with_grammars and s.grammar is not None]
        penalized, slots = self._penalties.slots_of(rows)
        if not (adjusted or with_grammar or penalized):
            return logits
        shaped = finite_logits(logits).clone()
        if penalized:
            self._penalties.apply(shaped, self._indices(penalized), self._indices(slots))
        for place, state in adjusted:
            state.adjust(shaped[place], lengths[place])
        cursors = [cursor for _, cursor in with_grammar if cursor is not None]
        if cursors:
            mask = allowed_mask(cursors, self.vocab_size)
            forbid_others(shaped, self._indices([place for place, _ in with_grammar]), mask)
        return shaped

    def count(self, rows: Sequence[int], token_ids: Tensor, times: Tensor | None = None) -> None:
        """Let penalties know of a token of each row (integer [n], -1 for none), or take it back.

        Args:
            times: int32 [n]; how often, None for once.
        """
        penalized, slots = self._penalties.slots_of(rows)
        if penalized:
            places = self._indices(penalized)
            self._penalties.count(self._indices(slots), token_ids[places], 1 if times is None else times[places])

    def _logprobs(
        self, batch: ScheduledBatch, sampled: list[int], raw: Tensor, token_ids: Tensor
    ) -> Sequence[tuple[TokenLogprobs, ...] | None]:
        """By request of the batch; empty when nobody asked. The copy to the host is on its way when this returns."""
        asked = [
            (place, index, num_top)
            for place, index in enumerate(sampled)
            if (num_top := self.num_logprobs(batch.rows[index])) is not None
        ]
        if not asked:
            return ()
        wanted = [num_top for _, _, num_top in asked]
        places = self._indices([place for place, _, _ in asked])
        copy = score_tokens(raw.index_select(0, places), token_ids[places], max(wanted)).start_copy()

        def make() -> list[tuple[TokenLogprobs, ...] | None]:
            columns: list[tuple[TokenLogprobs, ...] | None] = [None] * batch.num_reqs
            for (_, index, _), entry in zip(asked, entries_of(copy.wait(), wanted), strict=True):
                columns[index] = (entry,)
            return columns

        return LazyEntries(batch.num_reqs, make)

    def _prompt_logprobs(self, hidden: Tensor, batch: ScheduledBatch) -> Sequence[PromptEntries | None]:
        """Row i of a chunk scores the prompt token after it; the chunk's first scored position comes along.

        Logits are made for a block of rows at a time: those of a whole step could be gigabytes.
        """
        copies = []
        start = 0
        for index, row in enumerate(batch.rows):
            state, cached_len, query_len = self._states.get(row), batch.cached_lens[index], batch.query_lens[index]
            num_top = state.params.prompt_logprobs if state is not None else None
            targets = state.prompt[cached_len + 1 : cached_len + query_len + 1] if state is not None else ()
            if num_top is not None and targets:
                blocks = hidden[start : start + len(targets)].split(self._num_scored_rows)
                logits = (self.logits_of(block) for block in blocks)
                scored = score_blocks(logits, self._indices(targets).split(self._num_scored_rows), num_top)
                copies.append((index, cached_len + 1, [num_top] * len(targets), scored.start_copy()))
            start += query_len

        def make() -> list[PromptEntries | None]:
            columns: list[PromptEntries | None] = [None] * batch.num_reqs
            for index, first, counts, copy in copies:
                columns[index] = (first, tuple(entries_of(copy.wait(), counts)))
            return columns

        return LazyEntries(batch.num_reqs, make) if copies else ()

    def _indices(self, values: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self._device)


def _no_head(hidden: Tensor) -> Tensor:
    raise AssertionError("a sampler without a model scores no prompts")
