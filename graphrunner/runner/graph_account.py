"""The account of graphs: what each key cost, how often it ran, and why steps had none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.shape_key import ShapeKey
from graphrunner.execution.backend import CaptureStats
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)

_SURPRISES = frozenset(
    {
        GraphMissReason.NUM_REQS,
        GraphMissReason.NUM_TOKENS,
        GraphMissReason.QUERY_LEN,
        GraphMissReason.SEQ_LEN,
        GraphMissReason.ATTENTION,
    }
)
"""Not the user's own choice, not a failure reported before, not a graph that is about to be made."""


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
    misses_by_runner: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(the runner meant for the step, reason) -> steps."""
    num_eager_steps: int = 0
    num_checked_steps: int = 0

    @property
    def misses(self) -> dict[str, int]:
        """Steps without a graph, by reason."""
        counts: Counter[str] = Counter()
        for (_, reason), count in self.misses_by_runner.items():
            counts[reason] += count
        return dict(counts)


class GraphAccount:
    """Collects; one an engine."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, ShapeKey], KeyAccount] = {}
        self._failed: dict[tuple[str, ShapeKey], str] = {}
        self._misses: Counter[tuple[str, str]] = Counter()
        self._num_eager = 0
        self._num_checked = 0
        self._limits: dict[str, str] = {}
        self._warned: set[tuple[str, GraphMissReason]] = set()

    def limits(self, runner: str, text: str) -> None:
        """What the runner can hold, in words, for the warning when a step does not fit."""
        self._limits[runner] = text

    def captured(self, runner: str, key: ShapeKey, stats: CaptureStats) -> None:
        """A key was recorded; its counts start anew."""
        self._keys[runner, key] = KeyAccount(runner, key, stats)
        self._failed.pop((runner, key), None)

    def counted(self, runner: str, key: ShapeKey, num_nodes: int) -> None:
        """A recording's kernels were counted after its capture."""
        account = self._keys[runner, key]
        account.stats = replace(account.stats, num_nodes=num_nodes)

    def failed(self, runner: str, causes: Mapping[ShapeKey, str], num_tried: int) -> None:
        """Keys could not be recorded and are served eagerly. One warning for all of them."""
        if causes:
            self._failed |= {(runner, key): cause for key, cause in causes.items()}
            first = next(iter(causes.values()))
            text = "%s: capturing %d of %d shapes failed, they are served eagerly; the first: %s"
            log.warning(text, runner, len(causes), num_tried, first)

    def replayed(self, runner: str, key: ShapeKey, num_tokens: int) -> None:
        """A recording ran for `num_tokens` real tokens."""
        account = self._keys[runner, key]
        account.num_replays += 1
        account.num_real_tokens += num_tokens

    def missed(self, runner: str, miss: GraphMiss) -> None:
        """A step ran eagerly although `runner` is there for its kind. Warns once a reason, when it is a surprise."""
        self._misses[runner, miss.reason.name] += 1
        self._num_eager += 1
        if miss.reason in _SURPRISES and (runner, miss.reason) not in self._warned:
            self._warned.add((runner, miss.reason))
            log.warning("%s: no graph for a step: %s; %s", runner, miss, self._limits.get(runner, ""))

    def checked(self) -> None:
        """A replay was run once more, eagerly, and agreed."""
        self._num_checked += 1

    def report(self) -> GraphReport:
        """A snapshot."""
        failed = tuple((runner, key, cause) for (runner, key), cause in self._failed.items())
        return GraphReport(tuple(self._keys.values()), failed, dict(self._misses), self._num_eager, self._num_checked)
