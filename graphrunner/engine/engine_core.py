"""One step, one page: schedule, forward, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple, cast

from graphrunner.core.outputs import BlockHandle, EngineOutput, GenerationBatchResult, StepRecord, TokenHandle
from graphrunner.core.request import FinishReason, Request
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.core.shape_key import ForwardMode
from graphrunner.engine.model_runner import ModelRunner
from graphrunner.scheduler.scheduler import RequestUpdate, Scheduler
from graphrunner.speculative.speculation import Speculation, Verified
from graphrunner.telemetry import ranges
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)

_LITTLE = 0.1
"""Of a step's time: a pause of its caller that is no longer does not make it look long, nor does a longer one where the
step was waited for that long at least."""


class PendingStep(NamedTuple):
    """A launched step whose tokens may still be on their way."""

    scheduled: ScheduledBatch
    result: GenerationBatchResult
    start_s: float


class _TakenStep(NamedTuple):
    """A finished step whose tokens the scheduler has, and which is still to be told.

    Attributes:
        accepted: of a VERIFY step, the tokens of each request.
        taken_s: when its tokens had come.
        is_timed: whether the time until then is the step's own, and not that of somebody who came late for it.
    """

    pending: PendingStep
    updates: Sequence[RequestUpdate | None]
    accepted: Sequence[Sequence[int]]
    taken_s: float
    is_timed: bool


class StepOrder(Enum):
    """When a step's tokens are read, and when they are told.

    ONE_BY_ONE: both before the next step is scheduled.
    OVERLAPPED: both after the next step is launched.
    TOLD_BESIDE: read before the next step is scheduled, which must know them, and told while it runs.
    """

    ONE_BY_ONE = auto()
    OVERLAPPED = auto()
    TOLD_BESIDE = auto()


class EngineCore:
    """The loop's body. Requests in, `EngineOutput`s out; no text, no HTTP.

    Args:
        scheduler: decides each step.
        model_runner: runs it.
        order: of one step's end and the next one's begin.
        on_step: called with every finished step's record.
        speculation: told what became of drafts, and how long steps took; None without it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model_runner: ModelRunner,
        *,
        order: StepOrder = StepOrder.ONE_BY_ONE,
        on_step: Callable[[StepRecord], None] = lambda record: None,
        speculation: Speculation | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.model_runner = model_runner
        self._order = order
        self._on_step = on_step
        self._speculation = speculation
        self._in_flight: PendingStep | None = None
        self._untold: _TakenStep | None = None
        self._half_told: _TakenStep | None = None  # while its outputs are made, and for good when that broke
        self._returned_s = 0.0

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError when it can never be served."""
        self.scheduler.add(request)

    def finish_request(self, request_id: str, reason: FinishReason) -> bool:
        """End a request from outside (abort, stop string); whether it was live."""
        return self.scheduler.finish(request_id, reason)

    def has_unfinished_requests(self) -> bool:
        """Whether another step has something to do."""
        return self._in_flight is not None or self.scheduler.has_unfinished_requests()

    def step(self) -> list[EngineOutput]:
        """Run one step and return what it adds to each request.

        But for ONE_BY_ONE the returned outputs are those of the step before, while the new one runs.
        """
        if self._order is StepOrder.TOLD_BESIDE and self._in_flight is not None:
            paused_s = time.perf_counter() - self._returned_s
            self._untold, self._in_flight = self._take(self._in_flight, paused_s), None
        launched = self.launch()
        if self._order is StepOrder.ONE_BY_ONE:
            outputs = self.resolve(launched) if launched else []
            return outputs + self._ended_early()
        finished, self._in_flight = self._in_flight, launched
        if self._order is StepOrder.TOLD_BESIDE:
            outputs = self._tell_untold() + self._ended_early()
            self._returned_s = time.perf_counter()
            return outputs
        outputs = self.resolve(finished) if finished else []
        return outputs + self._ended_early()

    def launch(self) -> PendingStep | None:
        """Schedule and start one step; None when there is nothing to compute."""
        start_s = time.perf_counter()
        with ranges.SCHEDULE:
            scheduled = self.scheduler.schedule()
        if scheduled is None:
            return None
        return PendingStep(scheduled, self.model_runner.forward(scheduled), start_s)

    def resolve(self, pending: PendingStep) -> list[EngineOutput]:
        """Wait for a step's tokens and hand them out. Sync: waits for the step."""
        return self._tell(self._take(pending))

    def _take(self, pending: PendingStep, paused_s: float = 0.0) -> _TakenStep:
        """Wait for a step's tokens and give them to the scheduler.

        Args:
            pending: the step.
            paused_s: for how long nobody asked while it ran.
        """
        scheduled, result = pending.scheduled, pending.result
        accepted: Sequence[Sequence[int]] = ()
        asked_s = time.perf_counter()
        if scheduled.mode is ForwardMode.VERIFY:
            accepted = cast("BlockHandle", result.tokens).wait_blocks()
            taken_s = time.perf_counter()
            updates = self.scheduler.update_accepted(scheduled, accepted)
        else:
            token_ids = cast("TokenHandle", result.tokens).wait()
            taken_s = time.perf_counter()
            updates = self.scheduler.update(scheduled, token_ids)
        little_s = _LITTLE * (taken_s - pending.start_s)
        return _TakenStep(pending, updates, accepted, taken_s, paused_s < little_s or taken_s - asked_s > little_s)

    def _tell(self, taken: _TakenStep) -> list[EngineOutput]:
        """Account for a step and make its outputs: all that the launch of the next one need not wait for."""
        self._half_told = taken
        record, (scheduled, result, _) = _record(taken), taken.pending
        if self._speculation is not None:
            self._speculation.resolved(
                scheduled, _verified(taken), record, num_proposed=result.num_proposed, is_timed=taken.is_timed
            )
        self._on_step(record)
        outputs = [_output(update, result, index) for index, update in enumerate(taken.updates) if update is not None]
        self._half_told = None
        return outputs

    def _tell_untold(self) -> list[EngineOutput]:
        taken, self._untold = self._untold, None
        return [] if taken is None else self._tell(taken)

    def fail_running(self, cause: BaseException) -> list[EngineOutput]:
        """End every running request with an error after a step broke; the pool is whole afterwards.

        What an earlier step gave them, and those that it ended, is told before. Those that ended in a step whose
        telling broke end with the error, too: nobody else would ever hear of them.
        """
        if isinstance(cause, Exception):  # Ctrl-C is no fault to report
            log.error("a step failed and its requests end with an error", exc_info=cause)
        self._in_flight = None
        text = f"{type(cause).__name__}: {cause}"
        told = self._ended_early()
        try:
            told += self._tell_untold()
        except Exception:  # whom it ended is failed below
            log.exception("nor could the step before be told")
        failed = self._ended_untold() + self.scheduler.finish_running(FinishReason.ERROR)
        return told + [EngineOutput(request_id, finish_reason=FinishReason.ERROR, error=text) for request_id in failed]

    def _ended_early(self) -> list[EngineOutput]:
        return [_bare_output(update) for update in self.scheduler.take_ended_early()]

    def _ended_untold(self) -> list[str]:
        """Ids of the requests that ended in the step whose telling broke."""
        taken, self._half_told = self._half_told, None
        updates = () if taken is None else taken.updates
        return [update.request_id for update in updates if update is not None and update.finish_reason is not None]


def _bare_output(update: RequestUpdate) -> EngineOutput:
    """The end of a request that no step belongs to."""
    return EngineOutput(
        update.request_id,
        finish_reason=update.finish_reason,
        stop_reason=update.stop_reason,
        num_cached_tokens=update.num_cached_tokens,
    )


def _output(update: RequestUpdate, result: GenerationBatchResult, index: int) -> EngineOutput:
    """Join what the scheduler kept of a request's tokens with what the forward said about them."""
    logprobs = result.logprobs[index] if result.logprobs else None
    prompt_logprobs = result.prompt_logprobs[index] if result.prompt_logprobs else None
    return EngineOutput(
        request_id=update.request_id,
        new_token_ids=update.new_token_ids,
        logprobs=logprobs[: len(update.new_token_ids)] if logprobs is not None and update.new_token_ids else None,
        prompt_logprobs=prompt_logprobs[1] if prompt_logprobs else None,
        prompt_logprobs_start=prompt_logprobs[0] if prompt_logprobs else 0,
        finish_reason=update.finish_reason,
        stop_reason=update.stop_reason,
        num_cached_tokens=update.num_cached_tokens,
        embedding=result.embeddings[index] if result.embeddings else None,
        num_drafts=update.num_drafts,
        num_accepted=update.num_accepted,
    )


def _verified(taken: _TakenStep) -> list[Verified]:
    """What became of the drafts of requests that kept their rows: those of others may have new owners by now."""
    if not taken.accepted:
        return []
    scheduled = taken.pending.scheduled
    rounds = zip(scheduled.rows, scheduled.num_draft_tokens, taken.updates, strict=True)
    return [
        Verified(row, num_drafts, update.num_accepted)
        for row, num_drafts, update in rounds
        if num_drafts and update is not None and update.request.row == row
    ]


def _record(taken: _TakenStep) -> StepRecord:
    scheduled, result, start_s = taken.pending
    rounds = zip(taken.updates, taken.accepted, scheduled.num_draft_tokens, strict=True) if taken.accepted else ()
    accepted = [
        len(tokens) - 1 if update is None else update.num_accepted
        for update, tokens, num_drafts in rounds
        if num_drafts
    ]
    return StepRecord(
        step_id=scheduled.step_id,
        mode=scheduled.mode,
        runner=result.runner,
        key=result.key,
        num_reqs=scheduled.num_reqs,
        num_tokens=scheduled.num_tokens,
        is_graph=result.can_run_cuda_graph,
        miss_reason=result.miss_reason,
        start_s=start_s,
        duration_ms=(taken.taken_s - start_s) * 1e3,
        request_ids=scheduled.request_ids,
        num_drafts=sum(scheduled.num_draft_tokens),
        accepted_lengths=tuple(accepted),
    )
