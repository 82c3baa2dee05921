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
        num_by_key: steps a graph runner took, by (runner, key).
        num_by_miss: steps without a graph, by reason.
        num_tokens, num_padding_tokens: computed for somebody and for nobody.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._ring: deque[StepRecord] = deque(maxlen=capacity)
        self.num_by_runner: Counter[str] = Counter()
        self.num_by_key: Counter[tuple[str, str]] = Counter()
        self.num_by_miss: Counter[str] = Counter()
        self.num_tokens = 0
        self.num_padding_tokens = 0

    def add(self, record: StepRecord) -> None:
        """Take in a finished step."""
        self._ring.append(record)
        self.num_by_runner[record.runner] += 1
        self.num_tokens += record.num_tokens
        self.num_padding_tokens += record.num_padding_tokens
        if record.is_graph:
            # Eager keys are exact sizes, without number.
            self.num_by_key[record.runner, str(record.key)] += 1
        if record.miss_reason is not None:
            self.num_by_miss[record.miss_reason.reason.name] += 1

    @property
    def records(self) -> list[StepRecord]:
        """The last steps, oldest first."""
        return list(self._ring)

    def write_chrome_trace(self, path: Path) -> None:
        """Write the kept steps in the Chrome trace event format (chrome://tracing, ui.perfetto.dev).

        One event a step, one track a runner; runner, key, padding and miss reason are on each.
        """
        tracks = {runner: place for place, runner in enumerate(self.num_by_runner, start=1)}
        named = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": runner}}
            for runner, track in tracks.items()
        ]
        steps = [_event(record, tracks[record.runner]) for record in self._ring]
        path.write_text(json.dumps({"traceEvents": named + steps, "displayTimeUnit": "ms"}))


def _event(record: StepRecord, track: int) -> dict[str, object]:
    return {
        "name": f"{record.runner} {record.key}",
        "cat": record.mode.value,
        "ph": "X",
        "pid": 1,
        "tid": track,
        "ts": record.start_s * 1e6,
        "dur": record.duration_ms * 1e3,
        "args": {
            "step": record.step_id,
            "runner": record.runner,
            "key": str(record.key),
            "requests": record.num_reqs,
            "tokens": record.num_tokens,
            "padding": record.num_padding_tokens,
            "graph": record.is_graph,
            "miss": str(record.miss_reason) if record.miss_reason else "",
        },
    }
