import time

import psutil
import pytest

from graphrunner.core.startup_report import StartupPhase, StartupReport
from graphrunner.telemetry import startup
from graphrunner.telemetry.startup import BEFORE, StartupClock, process_age_s


def test_every_moment_and_byte_belongs_to_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_was_process_counted", True)
    used = [100]
    clock = StartupClock()
    time.sleep(0.02)
    clock.lap("a")
    clock.measure(lambda: used[0])
    used[0] += 50
    time.sleep(0.01)
    clock.lap("b", estimated_bytes=40)
    used[0] -= 20
    clock.lap("c")
    assert [(p.name, p.num_bytes, p.estimated_bytes) for p in clock.phases] == [
        ("a", 0, None), ("b", 50, 40), ("c", -20, None),
    ]  # fmt: skip
    assert clock.phases[0].seconds >= 0.02 and clock.phases[1].seconds >= 0.01
    report = StartupReport(tuple(clock.phases), clock.wall_s)
    assert report.total_s == pytest.approx(report.wall_s, abs=0.01)


def test_only_the_first_clock_of_a_process_counts_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_was_process_counted", False)
    age_s = process_age_s()
    clock = StartupClock()
    (phase,) = clock.phases
    assert phase.name == BEFORE and phase.seconds == pytest.approx(age_s, abs=0.05)
    assert clock.wall_s == pytest.approx(process_age_s(), abs=0.05)
    assert StartupClock().phases == []


def test_the_age_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    by_psutil = time.time() - psutil.Process().create_time()
    assert process_age_s() == pytest.approx(by_psutil, abs=1.5)  # psutil knows the machine's start to a second
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    assert process_age_s() == pytest.approx(by_psutil, abs=1.5)


def test_an_empty_report_is_one() -> None:
    assert StartupReport().total_s == 0 and StartupPhase("a", 1.0, 2).estimated_bytes is None
