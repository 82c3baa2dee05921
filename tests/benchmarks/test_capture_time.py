"""A start is timed from outside, its phases from inside."""

from pathlib import Path

import capture_time
import pytest
from result_rows import RowSink


def test_a_start_is_told_phase_by_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {name: value for name, value in capture_time.cache_environment(tmp_path).items() if name == "PYTHONPATH"}
    monkeypatch.setattr(capture_time, "cache_environment", lambda cache: paths)  # a cold start compiles for a minute
    account = capture_time.started("tiny", "cpu", ["capture=eager"], tmp_path)
    assert account["total_s"] > 0 and account["num_failed"] == 0
    assert sum(account["phases_s"].values()) == pytest.approx(account["total_s"], rel=0.05)
    assert {graph["variant"] for graph in account["graphs"]} >= {"greedy", "logits"}


def test_cold_comes_before_warm_and_a_start_that_fails_costs_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    account = {
        "memory_mib": {"capture": {"used": 300, "estimated": 310}},
        "limit_mib": 1000,
        "used_mib": 990,
        "total_s": 2.0,
        "phases_s": {"imports": 1.5, "capture": 0.4},
        "capture_s": 0.4,
        "num_failed": 0,
        "graphs": [],
    }
    answers = [capture_time.subprocess.TimeoutExpired("start", 140), account]

    def started(*args: object) -> dict:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(capture_time, "started", started)
    capture_time.measure("8B", "cpu", [], tmp_path, RowSink(None))
    printed = capsys.readouterr().out
    assert "no first token" in printed and "start/cold/8B" not in printed
    assert "start/warm/8B" in printed and "capture/8B" in printed
    assert "fall short" not in printed.split("capture/8B")[1].splitlines()[0]
    assert "start/phase_gap/8B" in printed and "start/memory/8B" in printed
