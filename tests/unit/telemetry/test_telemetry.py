"""Logging, metrics and the step trace."""

import logging

import pytest

from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.outputs import StepRecord
from graphrunner.core.shape_key import ForwardMode, ForwardVariant, ShapeKey
from graphrunner.telemetry.log import get_logger, lines_held, request_logging, setup_logging
from graphrunner.telemetry.metrics import EngineMetrics
from graphrunner.telemetry.step_trace import StepTrace


def record(step_id: int, *, miss: GraphMissReason | None = None, num_tokens: int = 3) -> StepRecord:
    return StepRecord(
        step_id=step_id,
        mode=ForwardMode.DECODE,
        runner="eager" if miss else "decode",
        key=ShapeKey(num_tokens if miss else 4, num_tokens if miss else 4, ForwardVariant.GREEDY),
        num_reqs=num_tokens,
        num_tokens=num_tokens,
        is_graph=miss is None,
        miss_reason=GraphMiss(miss, 9, 8) if miss else None,
        start_s=float(step_id),
        duration_ms=2.0,
    )


def test_trace_keeps_the_last_and_counts_all():
    trace = StepTrace(capacity=3)
    for step_id in range(5):
        trace.add(record(step_id))
    trace.add(record(5, miss=GraphMissReason.NUM_REQS))
    assert [kept.step_id for kept in trace.records] == [3, 4, 5]
    assert trace.num_by_runner == {"decode": 5, "eager": 1}
    assert trace.num_by_key == {("decode", ShapeKey(4, 4, ForwardVariant.GREEDY)): 5}
    assert trace.num_by_miss == {"NUM_REQS": 1}
    assert (trace.num_tokens, trace.num_padding_tokens) == (18, 5)


def test_metrics_of_steps_and_gauges():
    metrics, other = EngineMetrics(), EngineMetrics()
    metrics.add_step(record(0))
    metrics.add_step(record(1, miss=GraphMissReason.NUM_REQS))
    stats = EngineStats(num_running=3, num_waiting=4, num_used_pages=5, num_pages=6, num_preemptions=2)
    metrics.text(stats)
    text = metrics.text(stats).decode()  # a total, however often it is read
    assert 'graphrunner_steps_total{key="4t x 4r greedy",miss="",runner="decode"} 1.0' in text
    assert 'graphrunner_steps_total{key="exact",miss="NUM_REQS",runner="eager"} 1.0' in text
    for line in ("padding_tokens_total 1.0", "preemptions_total 2.0", "requests_running 3.0", "kv_pages_used 5.0"):
        assert f"graphrunner_{line}" in text
    assert "graphrunner_preemptions_total 0.0" in other.text().decode(), "engines do not share counters"


@pytest.fixture
def logged(capsys: pytest.CaptureFixture[str]):
    """A function that returns what the package logged since the last call."""
    root = logging.getLogger("graphrunner")
    before = list(root.handlers), root.level, root.propagate
    root.handlers = []
    setup_logging("info")
    yield lambda: capsys.readouterr().err
    root.handlers, root.level, root.propagate = before[0], before[1], before[2]
    root.setLevel(before[1])


def test_log_names_the_request(logged):
    log = get_logger("graphrunner.test_telemetry")
    with request_logging("q7"):
        log.info("inside")
    log.info("outside")
    log.debug("not shown")
    assert logged() == "INFO graphrunner.test_telemetry [q7]: inside\nINFO graphrunner.test_telemetry: outside\n"


def test_setup_twice_says_things_once_and_bad_levels_are_warnings(logged):
    setup_logging("nonsense")
    root = logging.getLogger("graphrunner")
    assert root.level == logging.WARNING and [handler.name for handler in root.handlers].count("graphrunner") == 1


def test_lines_wait_for_streamed_text_to_end_but_errors_do_not(logged):
    log = get_logger("graphrunner.test_telemetry")
    with pytest.raises(KeyboardInterrupt), lines_held():
        log.warning("costs more")
        assert logged() == ""
        log.error("broke")
        assert logged() == "ERROR graphrunner.test_telemetry: broke\n"
        raise KeyboardInterrupt
    assert logged() == "WARNING graphrunner.test_telemetry: costs more\n"
    log.warning("again")
    assert logged() == "WARNING graphrunner.test_telemetry: again\n"
