"""Speculation as the engine sees it: one proposer, a controller, and the account of what became of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphrunner.core.draft_plan import DraftPlan
from graphrunner.core.graph_miss import GraphMissReason
from graphrunner.core.outputs import StepRecord
from graphrunner.core.request import Request
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.core.shape_key import ForwardMode
from graphrunner.runner.base_graph_runner import BaseGraphRunner
from graphrunner.speculative.draft_controller import DraftController
from graphrunner.speculative.missed_tokens import MissedTokens
from graphrunner.speculative.proposer import DeviceProposer, DraftRound, DraftSequence, HostProposer, Proposer
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)

_ROUNDS_BETWEEN_ALARM_CHECKS = 16


class Verified(NamedTuple):
    """What became of one row's drafts in a step."""

    row: int
    num_drafts: int
    num_accepted: int


class Speculation:
    """A `DraftPlanner` around a proposer.

    Args:
        method: of the configuration, as the log calls the proposer.
        proposer: bound.
        controller: chooses widths.
        max_drafts: the engine's own `num_speculative_tokens`.
        vocab_size: of the target.
        missed: keeps account of steps that a draft with KV is not told about; None for others.

    Attributes:
        num_lookahead: see `DraftPlanner`.
        has_device_drafts: whether the proposer reads steps that were launched.
    """

    def __init__(
        self,
        method: str,
        proposer: Proposer,
        controller: DraftController,
        *,
        max_drafts: int,
        vocab_size: int,
        missed: MissedTokens | None = None,
    ) -> None:
        self._method = method
        self.proposer = proposer
        self._missed = missed
        self.controller = controller
        self.num_lookahead = max_drafts if proposer.kv_spec.layers else 0
        self._max_drafts = max_drafts
        self._vocab_size = vocab_size
        self._num_ready: dict[int, int] = {}  # by row: drafts that a device proposer left for its next step
        self._unsettled: set[tuple[int, int]] = set()  # shapes whose next step may record a graph first
        self._num_rounds = 0
        self._is_alarmed = False
        self._is_broken = False
        # Asked several times a round, and slow to ask of abstract classes.
        self._on_host = proposer if isinstance(proposer, HostProposer) else None
        self.has_device_drafts = self._on_host is None

    def plan(self, requests: Sequence[Request], num_useful: Sequence[int]) -> DraftPlan | None:
        """See `DraftPlanner.plan`."""
        if self._on_host is not None:
            return None if self._is_broken else self._plan_on_host(self._on_host, requests, num_useful)
        ready = self._num_ready
        if not ready:
            return None
        counts = [
            max(0, min(ready.get(request.row, 0), self._most_for(request), useful))
            for request, useful in zip(requests, num_useful, strict=True)
        ]
        # How many are worth it was decided when they were proposed.
        return self._planned(self.controller.width_for(max(counts, default=0)), counts, ())

    def _plan_on_host(
        self, proposer: HostProposer, requests: Sequence[Request], num_useful: Sequence[int]
    ) -> DraftPlan | None:
        rows, asked, sequences = [], [], []
        for place, (request, useful) in enumerate(zip(requests, num_useful, strict=True)):
            rows.append(request.row)
            wanted = min(self._most_for(request), useful)
            if wanted > 0:
                asked.append(place)
                sequences.append(DraftSequence(request.row, request.prompt_token_ids, request.output_token_ids, wanted))
        if not sequences:
            return None
        try:
            proposed = proposer.propose(sequences)
            self._check_drafts(proposed, len(sequences))
        except Exception as error:
            self.give_up(error)
            return None
        drafts: list[Sequence[int]] = [()] * len(rows)
        for place, sequence, token_ids in zip(asked, sequences, proposed, strict=True):
            drafts[place] = token_ids[: sequence.num_drafts]
        counts = [len(token_ids) for token_ids in drafts]
        return self._planned(self.controller.choose_width(rows, counts), counts, drafts)

    def _check_drafts(self, proposed: Sequence[Sequence[int]], num_sequences: int) -> None:
        if len(proposed) != num_sequences:
            raise ValueError(f"{len(proposed)} lists of drafts for {num_sequences} requests")
        for token_ids in proposed:
            if len(token_ids) and (min(token_ids) < 0 or max(token_ids) >= self._vocab_size):
                raise ValueError(f"drafts {[*token_ids]}: token ids go from 0 to {self._vocab_size - 1}")

    def give_up(self, error: Exception) -> None:
        """Do without a proposer that is broken, from inside the handler of its error: drafts may cost no request."""
        self._is_broken = True
        self._missed, self.num_lookahead = None, 0  # nobody reads or writes KV of its own from here on
        named = f"{type(error).__name__}: {error}"
        log.warning("speculation (%s) is off from here on: %s", self._method, named, exc_info=True)

    def filled_len(self, request: Request) -> int:
        """See `DraftPlanner.filled_len`."""
        filled_len = None if self._missed is None else self._missed.filled_len(request.row)
        return request.resolved_len if filled_len is None else min(filled_len, request.resolved_len)

    def take_rows(self, batch: ScheduledBatch) -> None:
        """Let go of what belonged to earlier owners of the step's new rows."""
        if batch.row_inits:
            if not self._is_broken:
                try:
                    self.proposer.take_rows(batch.row_inits)
                except Exception as error:
                    self.give_up(error)
            for init in batch.row_inits:
                self.controller.forget(init.row)
            if self._missed is not None:
                self._missed.forget(init.row for init in batch.row_inits)

    def num_drafts_after(self, batch: ScheduledBatch) -> int | None:
        """How many drafts a device proposer is to leave after a step, 0 to only take its tokens in; None: no call."""
        if not self.has_device_drafts or self._is_broken:
            return None
        rows = _sampled_rows(batch)
        width = self.controller.choose_width(rows, [self._max_drafts] * len(rows))
        has_prompts = batch.mode in (ForwardMode.PREFILL, ForwardMode.MIXED)
        return None if width == 1 and not has_prompts else width - 1

    def propose(self, round_: DraftRound) -> None:
        """Have the device proposer leave its drafts."""
        assert isinstance(self.proposer, DeviceProposer)
        if self._missed is not None:
            self._missed.close(round_.batch)
        self.proposer.propose(round_)

    def took_step(self, batch: ScheduledBatch, num_drafts: int | None) -> None:
        """Remember what the device proposer was asked for after a step, None for nothing."""
        if num_drafts is None and self._missed is not None:
            self._missed.miss(batch)
        ready = dict.fromkeys(_sampled_rows(batch), num_drafts) if num_drafts else {}
        if batch.mode is ForwardMode.PREFILL and self._num_ready:  # decode rows sat the step out; theirs are still good
            ready |= {row: count for row, count in self._num_ready.items() if row not in batch.rows}
        self._num_ready = ready

    def resolved(
        self,
        batch: ScheduledBatch,
        verified: Sequence[Verified],
        record: StepRecord,
        *,
        num_proposed: int = 0,
        is_timed: bool = True,
    ) -> None:
        """Take in a finished step.

        Args:
            batch: what was planned.
            verified: of each row with drafts whose request goes on.
            record: of the step.
            num_proposed: what a device proposer was asked for after it.
            is_timed: whether its duration is the step's own, and not that of somebody who came late.
        """
        for row, num_drafts, num_accepted in verified:
            self.controller.add_round(row, num_drafts, num_accepted)
        is_uniform = batch.mode in (ForwardMode.DECODE, ForwardMode.VERIFY)
        if is_uniform and self._is_typical(batch, record, num_proposed) and is_timed:
            self.controller.add_step(batch.num_reqs, batch.max_query_len, record.duration_ms)
        if verified and not self._is_alarmed:
            self._num_rounds += 1
            if self._num_rounds % _ROUNDS_BETWEEN_ALARM_CHECKS == 0:
                self._sound_alarm(batch, verified)

    def runners(self) -> Sequence[BaseGraphRunner]:
        """The proposer's graph runners."""
        return self.proposer.runners()

    def close(self) -> None:
        """Give the proposer's memory back. Idempotent."""
        self.proposer.close()

    def _is_typical(self, batch: ScheduledBatch, record: StepRecord, num_proposed: int) -> bool:
        """Whether the step's time says what others like it will take."""
        width = batch.max_query_len
        if self.has_device_drafts and num_proposed != width - 1:
            return False  # it verified some number of drafts and proposed another: the price of neither
        shape = (batch.num_reqs, width)
        if record.miss_reason is not None and record.miss_reason.reason is GraphMissReason.NOT_CAPTURED:
            self._unsettled.add(shape)
            return False
        if shape in self._unsettled:
            self._unsettled.remove(shape)
            return False
        return True

    def _most_for(self, request: Request) -> int:
        params = request.sampling_params
        # What a grammar allows after a draft is known only once the draft is on the host.
        if not params.speculative or params.structured_output is not None:
            return 0
        return min(self._max_drafts, params.num_speculative_tokens or self._max_drafts)

    def _planned(self, width: int, counts: Sequence[int], token_ids: Sequence[Sequence[int]]) -> DraftPlan | None:
        if width == 1:
            return None
        most = width - 1
        if max(counts) > most:
            counts = [min(count, most) for count in counts]
            token_ids = [ids[:most] for ids in token_ids]
        return DraftPlan(width, tuple(counts), tuple(token_ids), self.proposer.is_branching)

    def _sound_alarm(self, batch: ScheduledBatch, verified: Sequence[Verified]) -> None:
        """Warn once when drafts cost more time than they save."""
        width, num_reqs = batch.max_query_len, batch.num_reqs
        plain_ms, verify_ms = (self.controller.cost_ms(num_reqs, each) for each in (1, width))
        if plain_ms is None or verify_ms is None:
            return
        expected = sum(self.controller.expected(row, num_drafts) for row, num_drafts, _ in verified)
        if (num_reqs + expected) / verify_ms < num_reqs / plain_ms:
            self._is_alarmed = True
            log.warning(
                "speculation (%s) costs more than it saves at %d requests: %.2f drafts stand a round, and a round of "
                "width %d takes %.2f ms against %.2f ms of a plain step",
                self._method, num_reqs, expected / len(verified), width, verify_ms, plain_ms,
            )  # fmt: skip


def _sampled_rows(batch: ScheduledBatch) -> Sequence[int]:
    """Rows that get a token in a step."""
    if all(batch.samples):
        return batch.rows
    return [row for row, samples in zip(batch.rows, batch.samples, strict=True) if samples]
