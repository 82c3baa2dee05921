"""Drafts and the pages they need: what decode rows verify in a step, cut to what can be had."""

from collections.abc import Sequence
from dataclasses import replace

from graphrunner.core.draft_plan import DraftPlan, DraftPlanner
from graphrunner.core.request import Request
from graphrunner.core.scheduled_batch import SamplingNeed
from graphrunner.scheduler.batch_builder import DecodeColumns, PromptChunk
from graphrunner.scheduler.running_set import RunningSet


class DraftRoom:
    """Asks the planner, and has pages where there are any; nobody is preempted for a draft.

    Args:
        planner: says what decode rows verify; None for one token a row and step.
        running: whose pages grow.
    """

    def __init__(self, planner: DraftPlanner | None, running: RunningSet) -> None:
        self._planner = planner
        self._running = running

    def plan(self, decode: DecodeColumns) -> DraftPlan | None:
        """What the decode rows verify in this step; None for nothing."""
        requests = decode.requests
        if self._planner is None or not requests:
            return None
        # The last new token is never fed back, so no row computes past its `final_len`.
        num_useful = [request.final_len - request.cached_len - 1 for request in requests]
        plan = self._planner.plan(requests, num_useful)
        if plan is None or (plan.is_branching and decode.need is SamplingNeed.LOGITS):
            return None
        num_drafts = []
        for request, count, useful in zip(requests, plan.num_drafts, num_useful, strict=True):
            wanted = min(count, useful)
            num_drafts.append(self._running.reserve(request, 1 + wanted) - 1 if wanted > 0 else 0)
        if not any(num_drafts):
            return None
        held = tuple(num_drafts)
        return plan if held == plan.num_drafts else replace(plan, num_drafts=held)

    def reserve_lookahead(
        self, requests: Sequence[Request], drafts: DraftPlan | None, chunks: Sequence[PromptChunk]
    ) -> None:
        """Have pages, where there are any, for what a proposer writes ahead of the rows that get a token."""
        num_ahead = self._planner.num_lookahead if self._planner is not None else 0
        if num_ahead == 0:
            return
        counts = drafts.num_drafts if drafts is not None else (0,) * len(requests)
        for request, count in zip(requests, counts, strict=True):
            self._running.reserve(request, min(1 + count + num_ahead, request.final_len - request.cached_len))
        for chunk in chunks:
            if chunk.ends_prompt:  # its tokens are counted already
                request = chunk.request
                self._running.reserve(request, min(num_ahead, request.final_len - request.cached_len))
