"""How many drafts are worth verifying: measured times against measured acceptance.

A step that verifies w - 1 drafts a row takes longer than a plain one, and yields more tokens. Both sides are measured:

- the time of a step, by batch size (rounded up to the captured sizes) and width, from the steps themselves;
- the chance that a draft stands, by row, from its own last rounds; a row without rounds has the average of all.

Each step takes the width with the most expected tokens a second, width 1 (no speculation) included. A width whose time
is not known yet is tried twice. Now and then another than the best is tried again: while drafts are verified, the one
that was measured longest ago, and ever more rarely as long as the best stays the best; while none are, the widest,
since only verified drafts tell whether the text has become easier to guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.runner.capture_sizes import bucket_for

MAX_ADAPTIVE_REQS = 64
"""Largest batch that adaptive speculation is recorded for by default: past it the device is busy with plain steps."""

_NUM_TRIES = 2
_LEAST_PATIENCE, _MOST_PATIENCE = 384, 3072  # rounds between two probes
_NEW_SHARE = 0.1  # weight of the newest time in the running mean
_LARGEST_OUTLIER = 2.0  # a time above that multiple of the mean counts as that multiple: a pause is not a cost
_MEMORY = 0.95  # what a row's earlier rounds weigh after each new one
_PRIOR_TRIALS = 2.0
_FIRST_GUESS = 0.5


@dataclass(slots=True)
class StepCost:
    """The measured time of one batch size and width.

    Attributes:
        ms: running mean; of the first tries the shorter one.
        num_samples: how many steps were measured.
        last_round: of its batch size, when the last one was.
    """

    ms: float = 0.0
    num_samples: int = 0
    last_round: int = 0

    def add(self, ms: float, round_number: int) -> None:
        """Take in one step."""
        if self.num_samples < _NUM_TRIES:
            self.ms = ms if self.num_samples == 0 else min(ms, self.ms)
        else:
            self.ms += _NEW_SHARE * (min(ms, _LARGEST_OUTLIER * self.ms) - self.ms)
        self.num_samples += 1
        self.last_round = round_number

    def doubt(self) -> None:
        """Count no longer as known, until one more step was measured."""
        self.ms, self.num_samples = _LARGEST_OUTLIER * self.ms, _NUM_TRIES - 1

    @property
    def is_known(self) -> bool:
        """Whether there were enough tries."""
        return self.num_samples >= _NUM_TRIES


@dataclass(slots=True)
class SizeAccount:
    """What is known of one batch size, and when that is put to the test.

    Attributes:
        costs: by width.
        num_rounds: steps of that size whose width was chosen.
        best: the width that paid most in the last one.
        patience: rounds from the last probe to the next.
        probe_round: when the last one was.
    """

    costs: dict[int, StepCost] = field(default_factory=dict)
    num_rounds: int = 0
    best: int = 1
    patience: int = _LEAST_PATIENCE
    probe_round: int = 0

    def cost(self, width: int) -> StepCost:
        """Of a step of that width."""
        cost = self.costs.get(width)
        if cost is None:
            cost = self.costs[width] = StepCost()
        return cost

    def oldest(self, widths: Sequence[int]) -> int:
        """Of those widths but the best, the one that was measured longest ago."""
        return min((width for width in widths if width != self.best), key=lambda width: self.cost(width).last_round)

    def take_best(self, width: int) -> None:
        """Take in which width pays most now."""
        if width != self.best:
            self.best, self.patience = width, _LEAST_PATIENCE

    @property
    def is_probe_due(self) -> bool:
        """Whether another width than the best is to be tried now."""
        return self.num_rounds - self.probe_round >= self.patience

    def start_probe(self) -> None:
        """Count one as done; those of drafts that pay come ever more rarely."""
        self.probe_round = self.num_rounds
        if self.best > 1:
            self.patience = min(2 * self.patience, _MOST_PATIENCE)


@dataclass(slots=True)
class Acceptance:
    """How drafts of one row, or of all, fared; older rounds count less."""

    num_accepted: float = 0.0
    num_tried: float = 0.0

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Take in one round: what stands, and one more draft looked at where one fell."""
        self.num_accepted = _MEMORY * self.num_accepted + num_accepted
        self.num_tried = _MEMORY * self.num_tried + num_accepted + (num_accepted < num_drafts)

    def chance(self, prior: float) -> float:
        """That the next draft stands, given that those before it do."""
        return (self.num_accepted + _PRIOR_TRIALS * prior) / (self.num_tried + _PRIOR_TRIALS)


class DraftController:
    """Chooses the width of each step.

    Args:
        widths: that can be run, in rising order, 1 not among them.
        sizes: captured batch sizes; times are kept by them, and adaptive speculation ends at the largest.
        is_adaptive: else the largest width is always chosen.
        disable_at: batch size from which on nothing is verified; None for none.
        num_levels: most drafts that can stand, where they branch; None is all of them.
    """

    def __init__(
        self,
        widths: Sequence[int],
        sizes: Sequence[int],
        *,
        is_adaptive: bool = True,
        disable_at: int | None = None,
        num_levels: int | None = None,
    ) -> None:
        self.widths = tuple(widths)
        self._sizes = tuple(sizes)
        self._is_adaptive = is_adaptive
        self._disable_at = disable_at
        # By how many drafts there are at most: the widths that hold some of them.
        self._fitting = [
            tuple(width for width in self.widths if width <= self.width_for(count)) for count in range(self.widths[-1])
        ]
        self._num_levels = num_levels or self.widths[-1] - 1
        self._accounts: dict[int, SizeAccount] = {}  # by batch size
        self._rows: dict[int, Acceptance] = {}
        self._all = Acceptance()

    def forget(self, row: int) -> None:
        """Someone new has the row."""
        self._rows.pop(row, None)

    def choose_width(self, rows: Sequence[int], num_drafts: Sequence[int]) -> int:
        """The width of the next step; 1 when nothing should be verified.

        Args:
            rows: the decode rows.
            num_drafts: how many each could verify.
        """
        most = max(num_drafts, default=0)
        if most == 0 or (self._disable_at is not None and len(rows) >= self._disable_at):
            return 1
        fitting = self._fitting[min(most, len(self._fitting) - 1)]
        if not self._is_adaptive:
            return fitting[-1]
        if len(rows) > self._sizes[-1]:
            return 1
        account = self._account(len(rows))
        account.num_rounds += 1
        expected = self._expected_tokens(rows, num_drafts)
        best, most_a_ms = 1, 0.0
        for width in (1, *fitting):
            cost = account.cost(width)
            if not cost.is_known:
                return width
            tokens_a_ms = expected[min(width, len(expected)) - 1] / max(cost.ms, 1e-6)
            if tokens_a_ms > most_a_ms:
                best, most_a_ms = width, tokens_a_ms
        account.take_best(best)
        if not account.is_probe_due:
            return best
        account.start_probe()
        if best == 1:
            for row in rows:  # what was found of an earlier part of the text would outweigh what is found now
                self.forget(row)
        probed = fitting[-1] if best == 1 else account.oldest((1, *fitting))
        account.cost(probed).doubt()
        return probed

    def width_for(self, num_drafts: int) -> int:
        """The smallest width that holds so many drafts, or else the largest; 1 for none."""
        if num_drafts == 0:
            return 1
        return next((width for width in self.widths if width > num_drafts), self.widths[-1])

    def add_step(self, num_reqs: int, width: int, duration_ms: float) -> None:
        """Take in the time of a decode or verify step."""
        account = self._account(num_reqs)
        account.cost(width).add(duration_ms, account.num_rounds)

    def add_round(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Take in what became of a row's drafts."""
        own = self._rows.get(row)
        if own is None:
            own = self._rows[row] = Acceptance()
        own.add(num_drafts, num_accepted)
        self._all.add(num_drafts, num_accepted)

    def chance(self, row: int) -> float:
        """That the row's next draft stands, 0 to 1."""
        prior = self._all.chance(_FIRST_GUESS)
        own = self._rows.get(row)
        return prior if own is None else own.chance(prior)

    def expected(self, row: int, num_drafts: int) -> float:
        """How many of a row's drafts will stand."""
        chance = self.chance(row)
        return sum(chance**power for power in range(1, min(num_drafts, self._num_levels) + 1))

    def cost_ms(self, num_reqs: int, width: int) -> float | None:
        """The measured time of a step; None when it is not known."""
        cost = self._account(num_reqs).cost(width)
        return cost.ms if cost.is_known else None

    def _expected_tokens(self, rows: Sequence[int], num_drafts: Sequence[int]) -> list[float]:
        """What a step yields over all rows, by how many drafts of a row are verified."""
        standing = [0.0] * max(num_drafts)  # by place
        prior = self._all.chance(_FIRST_GUESS)
        for row, count in zip(rows, num_drafts, strict=True):
            if count:
                own = self._rows.get(row)
                chance = power = prior if own is None else own.chance(prior)
                for place in range(min(count, self._num_levels)):
                    standing[place] += power
                    power *= chance
        return [*accumulate(standing, initial=float(len(rows)))]

    def _account(self, num_reqs: int) -> SizeAccount:
        size = bucket_for(num_reqs, self._sizes) or num_reqs
        account = self._accounts.get(size)
        if account is None:
            account = self._accounts[size] = SizeAccount()
        return account


def widths_of(config: SpeculativeConfig) -> tuple[int, ...]:
    """Widths to record for a configuration; a tree is verified whole or not at all."""
    is_adaptive = config.adaptive and config.draft_tree is None
    return widths_for(config.num_drafts, is_adaptive=is_adaptive)


def widths_for(num_speculative_tokens: int, *, is_adaptive: bool) -> tuple[int, ...]:
    """Widths to record: room for 1, 2, 4, ... drafts and for all of them; only the last when k is fixed."""
    if not is_adaptive:
        return (num_speculative_tokens + 1,)
    counts = {num_speculative_tokens, *(1 << power for power in range(5) if 1 << power < num_speculative_tokens)}
    return tuple(sorted(count + 1 for count in counts))
