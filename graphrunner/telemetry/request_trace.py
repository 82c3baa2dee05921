"""When each request came, was first computed, gave its first token and ended."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from graphrunner.core.outputs import EngineOutput, StepRecord


@dataclass(slots=True)
class RequestSpan:
    """The life of one sequence; times as `time.perf_counter`, None while they are ahead."""

    request_id: str
    num_prompt_tokens: int
    arrival_s: float
    start_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str = ""

    def phases(self, now_s: float) -> list[tuple[str, float, float]]:
        """(name, from, to) of what it went through; a phase that still runs ends at `now_s`."""
        ended_s = now_s if self.end_s is None else self.end_s
        borders = [("waiting", self.arrival_s), ("prefill", self.start_s), ("decode", self.first_token_s)]
        known = [(name, begin_s) for name, begin_s in borders if begin_s is not None]
        ends = [begin_s for _, begin_s in known[1:]] + [ended_s]
        return [(name, begin_s, end_s) for (name, begin_s), end_s in zip(known, ends, strict=True)]


class RequestTrace:
    """Keeps the last `capacity` spans. A preempted request stays in the phase it had reached."""

    def __init__(self, capacity: int = 100_000) -> None:
        self._capacity = capacity
        self._spans: OrderedDict[str, RequestSpan] = OrderedDict()
        self._live: dict[str, RequestSpan] = {}

    @property
    def spans(self) -> list[RequestSpan]:
        """In order of arrival."""
        return list(self._spans.values())

    def arrived(self, request_id: str, num_prompt_tokens: int) -> None:
        """A sequence was admitted."""
        span = RequestSpan(request_id, num_prompt_tokens, time.perf_counter())
        self._spans.pop(request_id, None)  # an id may come back after its first owner ended
        self._spans[request_id] = self._live[request_id] = span
        if len(self._spans) > self._capacity:
            self._spans.popitem(last=False)

    def computed(self, record: StepRecord) -> None:
        """A step ran for some sequences."""
        for request_id in record.request_ids:
            span = self._live.get(request_id)
            if span is not None and span.start_s is None:
                span.start_s = record.start_s

    def took(self, outputs: Iterable[EngineOutput]) -> None:
        """A step's outputs came in."""
        now_s = time.perf_counter()
        for output in outputs:
            span = self._live.get(output.request_id)
            if span is None:
                continue
            span.num_output_tokens += len(output.new_token_ids)
            span.num_cached_tokens = max(span.num_cached_tokens, output.num_cached_tokens)
            if output.new_token_ids and span.first_token_s is None:
                span.first_token_s = now_s
            if output.finish_reason is not None:
                self.ended(output.request_id, output.finish_reason.value)

    def ended(self, request_id: str, reason: str) -> None:
        """A sequence ended; nothing happens when it had ended before."""
        span = self._live.pop(request_id, None)
        if span is not None:
            span.end_s, span.finish_reason = time.perf_counter(), reason
