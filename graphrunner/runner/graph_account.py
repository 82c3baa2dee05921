"""The account of graphs: what each key cost, how often it ran, and why steps had none."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.shape_key import ShapeKey
from graphrunner.execution.backend import CaptureStats
from graphrunner.telemetry.log import get_logger, warn_once

log = get_logger(__name__)


@dataclass(slots=True)
class KeyAccount:
    """One captured key."""

    runner: str
    key: ShapeKey
    stats: CaptureStats
    num_replays: int = 0
    num_real_tokens: int = 0

    @property
    def padding_share(self) -> float:
        """Share of the computed tokens that were padding, 0 to 1."""
        computed = self.num_replays * self.key.num_tokens
        return 1.0 - self.num_real_tokens / computed if computed else 0.0


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What `graphrunner graphs` prints."""

    keys: tuple[KeyAccount, ...] = ()
    failed: tuple[tuple[str, ShapeKey, str], ...] = ()
    misses: dict[str, int] = field(default_factory=dict)
    num_eager_steps: int = 0


class GraphAccount:
    """Collects; one an engine."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, ShapeKey], KeyAccount] = {}
        self._failed: list[tuple[str, ShapeKey, str]] = []
        self._misses: Counter[str] = Counter()
        self._num_eager = 0

    def captured(self, runner: str, key: ShapeKey, stats: CaptureStats) -> None:
        """A key was recorded."""
        self._keys[runner, key] = KeyAccount(runner, key, stats)

    def failed(self, runner: str, key: ShapeKey, cause: str) -> None:
        """A key could not be recorded; it is served eagerly."""
        self._failed.append((runner, key, cause))
        log.warning("%s: capturing %s failed, it is served eagerly: %s", runner, key, cause)

    def replayed(self, runner: str, key: ShapeKey, num_tokens: int) -> None:
        """A recording ran for `num_tokens` real tokens."""
        account = self._keys[runner, key]
        account.num_replays += 1
        account.num_real_tokens += num_tokens

    def missed(self, runner: str, miss: GraphMiss) -> None:
        """A step ran eagerly although `runner` is there for its kind. Warns once a reason."""
        self._misses[miss.reason.name] += 1
        self._num_eager += 1
        if miss.reason is GraphMissReason.OFF:
            return  # the user's own choice is no surprise
        warn_once(log, f"{id(self)}/{runner}/{miss.reason.name}", f"{runner}: no graph for a step: {miss}")

    def report(self) -> GraphReport:
        """A snapshot."""
        return GraphReport(tuple(self._keys.values()), tuple(self._failed), dict(self._misses), self._num_eager)
