"""The engine's own account of its steps: a ring of records, and totals."""

from __future__ import annotations

from collections import Counter, deque

from graphrunner.core.outputs import StepRecord
from graphrunner.core.shape_key import ShapeKey


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
        self.num_by_key: Counter[tuple[str, ShapeKey]] = Counter()
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
            self.num_by_key[record.runner, record.key] += 1
        if record.miss_reason is not None:
            self.num_by_miss[record.miss_reason.reason.name] += 1

    @property
    def records(self) -> list[StepRecord]:
        """The last steps, oldest first."""
        return list(self._ring)
