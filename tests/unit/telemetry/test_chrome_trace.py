"""The trace file: its format, its tracks, and requests in every state."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_telemetry import record

from graphrunner.core.errors import ConfigError
from graphrunner.core.graph_miss import GraphMissReason
from graphrunner.core.outputs import EngineOutput
from graphrunner.core.request import FinishReason
from graphrunner.telemetry import ranges
from graphrunner.telemetry.chrome_trace import TraceFile, trace_events
from graphrunner.telemetry.request_trace import RequestTrace
from graphrunner.telemetry.step_trace import StepTrace


def test_steps_say_runner_key_padding_and_miss():
    events = trace_events([record(0), record(1, miss=GraphMissReason.PADDING)])
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    steps = [event for event in events if event["ph"] == "X"]
    assert [names[step["tid"]] for step in steps] == ["decode", "eager"]
    assert (steps[0]["ts"], steps[1]["ts"], steps[0]["dur"]) == (0.0, 1e6, 2000.0)
    assert steps[0]["args"]["key"] == "4t x 4r greedy" and steps[0]["args"]["padding"] == 1
    assert steps[1]["args"]["miss"].startswith("PADDING") and steps[1]["args"]["graph"] is False


def test_requests_in_every_state():
    trace = RequestTrace()
    for name in ("done", "waits", "aborted", "in prefill"):
        trace.arrived(name, 5)
    at_s = trace.spans[-1].arrival_s
    trace.computed(replace(record(0), request_ids=("done", "in prefill", "unknown"), start_s=at_s))
    trace.took([EngineOutput("done", (4,), num_cached_tokens=2), EngineOutput("unknown", (1,))])
    trace.ended("aborted", "abort")
    trace.took([EngineOutput("done", (5, 6), finish_reason=FinishReason.LENGTH)])
    trace.ended("done", "abort")  # too late to matter
    done, waits, aborted, in_prefill = trace.spans
    assert (done.num_output_tokens, done.num_cached_tokens, done.finish_reason) == (3, 2, "length")
    assert [name for name, _, _ in done.phases(0.0)] == ["waiting", "prefill", "decode"]
    assert [name for name, _, _ in waits.phases(9e9)] == ["waiting"] and waits.phases(9e9)[0][2] == 9e9
    assert aborted.finish_reason == "abort" and aborted.phases(0.0)[0][2] == aborted.end_s
    assert [name for name, _, _ in in_prefill.phases(9e9)] == ["waiting", "prefill"]


def test_asynchronous_events_nest_and_close():
    trace = RequestTrace()
    trace.arrived("r", 5)
    trace.took([EngineOutput("r", (4,)), EngineOutput("r", (5,), finish_reason=FinishReason.STOP)])
    opened: list[object] = []
    for event in trace_events([], trace.spans):
        if event["ph"] == "b":
            opened.append((event["id"], event["cat"], event["name"]))
        elif event["ph"] == "e":
            assert opened.pop() == (event["id"], event["cat"], event["name"])
    assert not opened


def test_only_the_last_spans_are_kept():
    trace = RequestTrace(capacity=2)
    for name in "abc":
        trace.arrived(name, 1)
    assert [span.request_id for span in trace.spans] == ["b", "c"]


def test_the_file_is_json_and_a_bad_place_is_refused_at_once(tmp_path: Path):
    steps = StepTrace()
    file = TraceFile(tmp_path / "t.json", steps, RequestTrace())
    steps.add(record(0))
    file.write()
    assert len(json.loads((tmp_path / "t.json").read_text())["traceEvents"]) == 4
    with pytest.raises(ConfigError, match=r"trace=.*cannot be written"):
        TraceFile(tmp_path / "nowhere" / "t.json", steps, RequestTrace())


def test_ranges_are_silent_until_turned_on():
    calls: list[str] = []
    with ranges.EXECUTE:
        pass
    ranges.turn_on(calls.append, lambda: calls.append("pop"))
    try:
        with ranges.EXECUTE, ranges.SAMPLE:
            pass
    finally:
        ranges.turn_off()
    with ranges.EXECUTE:
        pass
    assert calls == ["graphrunner.execute", "graphrunner.sample", "pop", "pop"]
