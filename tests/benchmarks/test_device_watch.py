"""What is read of a card while it works."""

import time
from pathlib import Path

import pytest

from benchmarks.device_watch import DeviceWatch, numbers

SAMPLES = ["1980, 1980, 400.50, 700.00", "1300, 1980, 690.00, 700.00", "1310, 1980, [N/A], 700.00", "1290, 1980, 695."]


@pytest.fixture
def fake_program(tmp_path: Path, monkeypatch) -> Path:
    """An nvidia-smi that says SAMPLES, the last one cut, and then waits to be ended."""
    program = tmp_path / "nvidia-smi"
    text = "\\n".join([*SAMPLES[:3], SAMPLES[1], SAMPLES[3]])
    program.write_text(f"#!/bin/sh\nprintf '{text}'\ntouch {tmp_path}/said\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "said"


def test_medians_of_whole_samples_are_told_and_the_program_is_ended(fake_program: Path) -> None:
    with DeviceWatch() as watch:
        deadline_s = time.monotonic() + 20
        while not fake_program.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert watch.line() == "clock 1300 MHz of 1980, power 690 W of 700"
    assert watch._process is not None and watch._process.returncode is not None


def test_without_the_program_nothing_is_known(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with DeviceWatch() as watch:
        pass
    assert watch.line() == ""


def test_a_line_with_a_field_that_is_no_number_is_none() -> None:
    assert numbers("1300, 1980, [N/A], 700") == []
