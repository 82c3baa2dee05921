"""The engine's own account of its steps: a ring of records, totals, and a trace file."""

from __future__ import annotations

import json
from collections import Counter, deque
from pathlib import Path

from graphrunner.core.outputs import StepRecord


class StepTrace:
    """Keeps the last `capacity` records; counts all.

    Attributes:
        num_by_runner: steps a runner took.
        num_by_miss: steps without a graph, by reason.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._ring: deque[StepRecord] = deque(maxlen=capacity)
        self.num_by_runner: Counter[str] = Counter()
        self.num_by_miss: Counter[str] = Counter()

    def add(self, record: StepRecord) -> None:
        """Take in a finished step."""
        self._ring.append(record)
        self.num_by_runner[record.runner] += 1
        if record.miss_reason is not None:
            self.num_by_miss[record.miss_reason.reason.name] += 1

    @property
    def records(self) -> list[StepRecord]:
        """The last steps, oldest first."""
        return list(self._ring)

    def write_chrome_trace(self, path: Path) -> None:
        """Write the kept steps as a Chrome / Perfetto trace, one event a step, coloured by runner."""
        events = [
            {
                "name": f"{record.runner} {record.key}",
                "cat": record.mode.value,
                "ph": "X",
                "pid": 1,
                "tid": record.runner,
                "ts": record.start_s * 1e6,
                "dur": record.duration_ms * 1e3,
                "args": {
                    "step": record.step_id,
                    "requests": record.num_reqs,
                    "tokens": record.num_tokens,
                    "padding": record.num_padding_tokens,
                    "miss": str(record.miss_reason) if record.miss_reason else "",
                },
            }
            for record in self._ring
        ]
        path.write_text(json.dumps({"traceEvents": events}))
