"""Steps and request lifetimes as one file in the Chrome trace event format (chrome://tracing, ui.perfetto.dev).

Source: the Trace Event Format document of the Chromium project. Complete events ("X") for steps, one thread a runner;
nestable asynchronous events ("b", "e") for requests, one track each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from graphrunner.core.errors import ConfigError
from graphrunner.core.outputs import StepRecord
from graphrunner.telemetry.request_trace import RequestSpan, RequestTrace
from graphrunner.telemetry.step_trace import StepTrace

_STEPS, _REQUESTS = 1, 2  # process ids: two groups of tracks
Event = dict[str, object]


class TraceFile:
    """Where a run's trace goes when it ends.

    Args:
        path: of the file.
        steps, requests: what is written.

    Raises:
        ConfigError: the file cannot be written; said before anything is loaded.
    """

    def __init__(self, path: Path, steps: StepTrace, requests: RequestTrace) -> None:
        try:
            path.open("a").close()  # unlike touch it refuses a folder
        except OSError as error:
            raise ConfigError("trace", str(path), f"cannot be written: {error.strerror}") from None
        self.steps = steps
        self.requests = requests
        self._path = path

    def write(self) -> None:
        """Write what there is."""
        events = trace_events(self.steps.records, self.requests.spans)
        self._path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def trace_events(records: Sequence[StepRecord], spans: Sequence[RequestSpan] = ()) -> list[Event]:
    """Every event of a run, names of tracks first."""
    tracks = {runner: place for place, runner in enumerate(dict.fromkeys(r.runner for r in records), start=1)}
    events = [_named("process_name", _STEPS, 0, "steps, by runner"), _named("process_name", _REQUESTS, 0, "requests")]
    events += [_named("thread_name", _STEPS, track, runner) for runner, track in tracks.items()]
    events += [_step_event(record, tracks[record.runner]) for record in records]
    now_s = time.perf_counter()
    return events + [event for span in spans for event in _request_events(span, now_s)]


def _named(kind: str, process: int, thread: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _step_event(record: StepRecord, track: int) -> Event:
    return {
        "name": f"{record.runner} {record.key}",
        "cat": record.mode.value,
        "ph": "X",
        "pid": _STEPS,
        "tid": track,
        "ts": record.start_s * 1e6,
        "dur": record.duration_ms * 1e3,
        "args": {
            "step": record.step_id,
            "runner": record.runner,
            "key": str(record.key),
            "requests": record.num_reqs,
            "request_ids": list(record.request_ids),
            "tokens": record.num_tokens,
            "padding": record.num_padding_tokens,
            "drafts": record.num_drafts,
            "accepted": record.num_accepted,
            "graph": record.is_graph,
            "miss": str(record.miss_reason) if record.miss_reason else "",
        },
    }


def _request_events(span: RequestSpan, now_s: float) -> list[Event]:
    """The whole life, and its phases inside it."""
    args: Event = {
        "prompt_tokens": span.num_prompt_tokens,
        "cached_tokens": span.num_cached_tokens,
        "output_tokens": span.num_output_tokens,
        "finish_reason": span.finish_reason,
    }
    phases = span.phases(now_s)
    whole = [_async_event("b", span, span.request_id, span.arrival_s) | {"args": args}]
    for name, begin_s, end_s in phases:
        whole += [_async_event("b", span, name, begin_s), _async_event("e", span, name, end_s)]
    return [*whole, _async_event("e", span, span.request_id, phases[-1][2])]


def _async_event(phase: str, span: RequestSpan, name: str, at_s: float) -> Event:
    base: Event = {"name": name, "cat": "request", "ph": phase, "id": span.request_id}
    return base | {"pid": _REQUESTS, "tid": 0, "ts": at_s * 1e6}
