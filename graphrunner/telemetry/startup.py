"""A clock for the start of an engine: every moment and every byte belongs to one phase."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from graphrunner.core.startup_report import StartupPhase

BEFORE = "process start, imports"
"""The first phase: all that happened before the engine was asked for, the caller's own work included."""

_was_process_counted = False


class StartupClock:
    """Started when made; the first one of a process starts with the process.

    Attributes:
        phases: so far.
    """

    def __init__(self) -> None:
        global _was_process_counted  # noqa: PLW0603  # a process starts once, whoever makes its first engine
        self._last_s = time.perf_counter()
        age_s = 0.0 if _was_process_counted else process_age_s()
        _was_process_counted = True
        self._start_s = self._last_s - age_s
        self._used_bytes = 0
        self._measure: Callable[[], int] = int
        self.phases: list[StartupPhase] = []
        if age_s:
            self.phases.append(StartupPhase(BEFORE, age_s, 0))

    @property
    def wall_s(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._start_s

    def measure(self, used_bytes: Callable[[], int]) -> None:
        """Count memory from here on. Until a device is known there is nothing to ask."""
        self._measure = used_bytes
        self._used_bytes = used_bytes()

    def lap(self, name: str, estimated_bytes: int | None = None) -> StartupPhase:
        """End a phase: what passed since the last one is its own."""
        used_bytes = self._measure()
        now_s = time.perf_counter()
        phase = StartupPhase(name, now_s - self._last_s, used_bytes - self._used_bytes, estimated_bytes)
        self._last_s, self._used_bytes = now_s, used_bytes
        self.phases.append(phase)
        return phase


def process_age_s() -> float:
    """Seconds since this process was started."""
    try:
        # The 22nd field, counted after the name, which may hold spaces: clock ticks since the machine's start.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)
    except (OSError, AttributeError, ValueError, IndexError):
        import psutil

        return max(0.0, time.time() - psutil.Process().create_time())
