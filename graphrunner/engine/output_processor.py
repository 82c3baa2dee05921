"""Token ids in, `RequestOutput`s out: text, stop strings, logprobs by name, and the fan-in of `n` outputs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from graphrunner.core.outputs import (
    CompletionOutput,
    EngineOutput,
    Logprob,
    RequestOutput,
    SpeculationStats,
    TokenLogprobs,
)
from graphrunner.core.request import FinishReason
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.engine.sequence_ids import sequence_ids
from graphrunner.telemetry.log import get_logger
from graphrunner.telemetry.metrics import EngineMetrics
from graphrunner.tokenizer.detokenizer import IncrementalDetokenizer
from graphrunner.tokenizer.stop import StopMatcher
from graphrunner.tokenizer.tokenizer import Tokenizer

log = get_logger(__name__)


class RequestOutputKind(Enum):
    """How much each `RequestOutput` holds."""

    CUMULATIVE = "cumulative"  # everything so far
    DELTA = "delta"  # what is new
    FINAL_ONLY = "final"  # one output, at the end


@dataclass(frozen=True, slots=True)
class ProcessedOutputs:
    """Outputs to hand out, and sequences that a stop string ended: the engine must be told."""

    outputs: list[RequestOutput]
    to_finish: list[str]


@dataclass(slots=True)
class _Sequence:
    """One of the n outputs."""

    completion: CompletionOutput
    detokenizer: IncrementalDetokenizer | None
    matcher: StopMatcher | None
    min_tokens: int = 0
    last_token_s: float = 0.0
    is_finished: bool = False
    num_tokens: int = 0
    is_steady: bool = False  # streamed, past its first token, without logprobs, stop strings or siblings


@dataclass(slots=True)
class _State:
    """One request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    kind: RequestOutputKind
    tokenizer: Tokenizer | None
    sequences: list[_Sequence]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    embedding: tuple[float, ...] | None = None
    num_unfinished: int = field(default=0)


class OutputProcessor:
    """Holds the text side of every live request. Host only.

    Args:
        metrics: told of first tokens, gaps and ends; None counts nothing.
    """

    def __init__(self, metrics: EngineMetrics | None = None) -> None:
        self._metrics = metrics
        self._states: dict[str, _State] = {}
        self._parents: dict[str, tuple[_State, _Sequence]] = {}

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        kind: RequestOutputKind,
        tokenizer: Tokenizer | None,
    ) -> None:
        """Begin a request; its id must not be live."""
        assert request_id not in self._states, f"request {request_id} is live"
        voice = tokenizer if params.detokenize else None
        sequences = [_new_sequence(index, params, voice) for index in range(params.n)]
        state = _State(request_id, prompt, prompt_token_ids, params, kind, voice, sequences)
        state.num_unfinished = params.n
        now_s = time.perf_counter()
        for sequence in sequences:
            sequence.last_token_s = now_s
        if params.prompt_logprobs is not None:
            state.prompt_logprobs = [None] * len(prompt_token_ids)
        self._states[request_id] = state
        for sequence_id, sequence in zip(sequence_ids(request_id, params.n), sequences, strict=True):
            self._parents[sequence_id] = (state, sequence)

    def remove_request(self, request_id: str) -> list[str]:
        """Forget a request; the ids of its sequences, empty when it was not live."""
        state = self._states.pop(request_id, None)
        if state is None:
            return []
        children = sequence_ids(request_id, state.params.n)
        for child_id in children:
            self._parents.pop(child_id, None)
        return children

    def process(self, outputs: Iterable[EngineOutput]) -> ProcessedOutputs:
        """Take in what a step added. Outputs of requests that are gone are dropped."""
        touched: dict[str, tuple[_State, list[_Sequence]]] = {}
        to_finish: list[str] = []
        steady: list[RequestOutput] = []
        now_s = time.perf_counter()
        for output in outputs:
            found = self._parents.get(output.request_id)
            if found is None:
                continue
            state, sequence = found
            if sequence.is_finished:
                continue
            if sequence.is_steady and _is_plain(output):
                piece = self._next_piece(state, sequence, output.new_token_ids[0], now_s)
                if piece is not None:
                    steady.append(piece)
                    continue
            num_before = sequence.num_tokens
            if self._take(state, sequence, output):
                to_finish.append(output.request_id)
            if sequence.is_finished:
                state.num_unfinished -= 1
            sequence.is_steady = _is_steady(state, sequence)
            if self._metrics is not None:
                _measure(self._metrics, sequence, num_before, output, len(state.prompt_token_ids), now_s)
            touched.setdefault(state.request_id, (state, []))[1].append(sequence)
        made = [self._output_of(state, changed) for state, changed in touched.values() if self._is_shown(state)]
        for state, _ in touched.values():
            if state.num_unfinished == 0:
                self.remove_request(state.request_id)
        return ProcessedOutputs(steady + made, to_finish)

    def _next_piece(self, state: _State, sequence: _Sequence, token_id: int, now_s: float) -> RequestOutput | None:
        """What `_take`, `_measure` and `_output_of` make of a streamed token with nothing special about it.

        Nearly every token of a busy server is one; at hundreds of streams the general way would be most of a step.
        None, with nothing done, when the token is special after all.
        """
        assert sequence.detokenizer is not None
        try:
            text = sequence.detokenizer.whole_text_of(token_id)
        except Exception:  # the general way meets it again, and knows what to do with it
            return None
        if text is None:
            return None
        sequence.num_tokens += 1
        if self._metrics is not None:
            self._metrics.add_tokens(1, now_s - sequence.last_token_s)
            sequence.last_token_s = now_s
        return RequestOutput(
            state.request_id,
            state.prompt,
            state.prompt_token_ids,
            [CompletionOutput(sequence.completion.index, text, [token_id])],
            num_cached_tokens=state.num_cached_tokens,
        )

    def _take(self, state: _State, sequence: _Sequence, output: EngineOutput) -> bool:
        """Add an output to its sequence; whether the sequence ended here, unknown to the engine."""
        try:
            return self._add(state, sequence, output)
        except Exception as error:  # a token that cannot be spelled is the trouble of this sequence alone
            log.error("an output of request %s could not be read", state.request_id, exc_info=error)
            sequence.is_finished = True
            sequence.completion.finish_reason = FinishReason.ERROR.value
            sequence.completion.stop_reason = f"{type(error).__name__}: {error}"
            return output.finish_reason is None

    def _add(self, state: _State, sequence: _Sequence, output: EngineOutput) -> bool:
        """Add an output to its sequence; whether a stop string ended it."""
        state.num_cached_tokens = max(state.num_cached_tokens, output.num_cached_tokens)
        state.embedding = output.embedding
        if output.prompt_logprobs and state.prompt_logprobs is not None:
            for offset, scored in enumerate(output.prompt_logprobs):
                state.prompt_logprobs[output.prompt_logprobs_start + offset] = _named(scored, state.tokenizer)
        if output.num_drafts:
            stats = sequence.completion.speculation = sequence.completion.speculation or SpeculationStats()
            stats.add(output.num_drafts, output.num_accepted)
        stopped_by: str | None = None
        new_token_ids = output.new_token_ids
        if sequence.detokenizer is None and not output.logprobs:  # nothing to spell, so nothing to stop at
            sequence.completion.token_ids.extend(new_token_ids)
            sequence.num_tokens += len(new_token_ids)
            new_token_ids = ()
        for place, token_id in enumerate(new_token_ids):
            entry = output.logprobs[place] if output.logprobs else None
            stopped_by = _add_token(sequence, token_id, entry, state.tokenizer, _is_silent(output, place, state.params))
            if stopped_by is not None:
                break
        if stopped_by is not None:
            sequence.is_finished = True
            sequence.completion.finish_reason, sequence.completion.stop_reason = "stop", stopped_by
            return output.finish_reason is None
        if output.finish_reason is not None:
            sequence.is_finished = True
            _flush(sequence)
            if sequence.completion.finish_reason is None:
                sequence.completion.finish_reason = output.finish_reason.value
                sequence.completion.stop_reason = output.error or output.stop_reason
        return False

    @staticmethod
    def _is_shown(state: _State) -> bool:
        return state.kind is not RequestOutputKind.FINAL_ONLY or state.num_unfinished == 0

    @staticmethod
    def _output_of(state: _State, changed: list[_Sequence]) -> RequestOutput:
        """What is new of the sequences that changed, or all of every sequence."""
        if state.kind is RequestOutputKind.DELTA:
            completions = [_delta(sequence) for sequence in changed]
        else:
            completions = [_snapshot(sequence) for sequence in state.sequences]
        return RequestOutput(
            request_id=state.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=completions,
            finished=state.num_unfinished == 0,
            num_cached_tokens=state.num_cached_tokens,
            prompt_logprobs=state.prompt_logprobs,
            embedding=state.embedding,
        )


def _new_sequence(index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> _Sequence:
    completion = CompletionOutput(index)
    if params.logprobs is not None:
        completion.logprobs, completion.cumulative_logprob = [], 0.0
    detokenizer = None
    if tokenizer is not None:
        detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
    matcher = None
    if params.stop_strings:
        matcher = StopMatcher(params.stop_strings, params.include_stop_str_in_output)
    return _Sequence(completion, detokenizer, matcher, params.min_tokens)


def _is_steady(state: _State, sequence: _Sequence) -> bool:
    """Whether the next token may take the short way, `OutputProcessor._next_piece`."""
    return (
        state.kind is RequestOutputKind.DELTA
        and state.params.n == 1
        and sequence.num_tokens > 0
        and sequence.detokenizer is not None
        and sequence.matcher is None
        and sequence.completion.logprobs is None
        and sequence.completion.speculation is None
        and state.prompt_logprobs is None
    )


def _is_plain(output: EngineOutput) -> bool:
    """Whether an output is one token in the middle of a text."""
    return len(output.new_token_ids) == 1 and output.finish_reason is None and not output.num_drafts


def _is_silent(output: EngineOutput, place: int, params: SamplingParams) -> bool:
    """Whether this token is the end or stop token that finished the request: it is counted but not spelled."""
    is_last = place == len(output.new_token_ids) - 1
    return is_last and output.finish_reason is FinishReason.STOP and not params.include_stop_str_in_output


def _add_token(
    sequence: _Sequence, token_id: int, entry: TokenLogprobs | None, tokenizer: Tokenizer | None, is_silent: bool
) -> str | None:
    """Append one token; the stop string it completed, or None."""
    completion = sequence.completion
    completion.token_ids.append(token_id)
    sequence.num_tokens += 1
    if entry is not None and completion.logprobs is not None:
        completion.logprobs.append(_named(entry, tokenizer))
        completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + entry.logprob
    if sequence.detokenizer is None or is_silent:
        return None
    text = sequence.detokenizer.append_one(token_id)
    if sequence.matcher is None or sequence.num_tokens < sequence.min_tokens:
        completion.text += text
        return None
    found = sequence.matcher.append(text)
    completion.text += found.text
    return found.stop


def _flush(sequence: _Sequence) -> None:
    """What the detokenizer and the matcher still hold becomes text; a stop may complete in it."""
    if sequence.detokenizer is None:
        return
    text = sequence.detokenizer.finish()
    if sequence.matcher is not None:
        found = sequence.matcher.append(text)
        text = found.text
        if found.stop is not None:
            sequence.completion.finish_reason, sequence.completion.stop_reason = "stop", found.stop
        else:
            text += sequence.matcher.finish()
    sequence.completion.text += text


def _snapshot(sequence: _Sequence) -> CompletionOutput:
    """All of a completion so far, in lists of its own."""
    whole = sequence.completion
    logprobs = None if whole.logprobs is None else list(whole.logprobs)
    return replace(whole, token_ids=list(whole.token_ids), logprobs=logprobs, speculation=_copied(whole.speculation))


def _delta(sequence: _Sequence) -> CompletionOutput:
    """The part of a completion that was not handed out yet; what comes next begins a new part."""
    part = sequence.completion
    sequence.completion = CompletionOutput(
        index=part.index,
        cumulative_logprob=part.cumulative_logprob,
        logprobs=None if part.logprobs is None else [],
        speculation=_copied(part.speculation),
    )
    return part


def _copied(stats: SpeculationStats | None) -> SpeculationStats | None:
    if stats is None:
        return None
    lengths = list(stats.accepted_lengths), list(stats.drafted_lengths)
    return SpeculationStats(stats.num_drafts, stats.num_accepted, *lengths)


def _named(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """User-facing logprobs of one position: the token itself first, then the likeliest."""
    chosen = [(entry.token_id, entry.logprob, entry.rank)]
    ranked: Sequence[tuple[int, float, int]] = [(i, p, rank) for rank, (i, p) in enumerate(entry.top, start=1)]
    return {
        token_id: Logprob(logprob, rank, tokenizer.decode([token_id]) if tokenizer else None)
        for token_id, logprob, rank in [*chosen, *(item for item in ranked if item[0] != entry.token_id)]
    }


def _measure(
    metrics: EngineMetrics,
    sequence: _Sequence,
    num_before: int,
    output: EngineOutput,
    num_prompt_tokens: int,
    now_s: float,
) -> None:
    """Tell the metrics what an output meant for its sequence."""
    num_new = sequence.num_tokens - num_before
    if num_new:
        gap_s, sequence.last_token_s = now_s - sequence.last_token_s, now_s
        if num_before == 0:
            metrics.add_first_token(gap_s, num_prompt_tokens, output.num_cached_tokens)
            metrics.add_tokens(num_new, None)
        else:
            metrics.add_tokens(num_new, gap_s)
    if output.embedding is not None:
        metrics.add_embedding(num_prompt_tokens)
    if sequence.is_finished:
        metrics.add_finished(sequence.completion.finish_reason or "")
