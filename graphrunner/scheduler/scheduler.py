"""Which requests compute which tokens in the next step, and what a finished step changes.

    batch = scheduler.schedule()            host integers out
    ... the step runs ...
    results = scheduler.update(batch, ids)  append, finish, free pages, share prefixes

Under overlap `schedule` is called again before `update` of the step before: it counts what is on the way
(`Request.num_pending_tokens`) and plans as if it were there. Host only; no torch.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphrunner.config.engine_config import SchedulerConfig
from graphrunner.core.draft_plan import DraftPlanner
from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.request import FinishReason, Request, RequestStatus
from graphrunner.core.scheduled_batch import PageAppend, ScheduledBatch
from graphrunner.core.shape_key import ForwardMode
from graphrunner.kvcache.page_allocator import PageAllocator
from graphrunner.kvcache.prefix_cache import PrefixCache
from graphrunner.scheduler.admission import QueueFullError, capped_max_new_tokens, check_request
from graphrunner.scheduler.batch_builder import DecodeColumns, PromptChunk, build_batch, build_verify_batch
from graphrunner.scheduler.draft_room import DraftRoom
from graphrunner.scheduler.policy import WaitingQueue, by_age, most_steps_waited
from graphrunner.scheduler.prompt_planner import PromptPlanner
from graphrunner.scheduler.running_set import RunningSet
from graphrunner.scheduler.step_filler import StepFiller
from graphrunner.scheduler.stop_rules import append_tokens, stop_ids_of


class RequestUpdate(NamedTuple):
    """What a finished step did to one request.

    Attributes:
        request: the request; its `output_token_ids` already hold the new tokens.
        new_token_ids: tokens appended, cut at the one that ended it; empty for a chunk inside a prompt.
        finish_reason: set when it ended.
        num_drafts, num_accepted: drafts verified in the step, and those among `new_token_ids`.
    """

    request: Request
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def request_id(self) -> str:
        """Whose update it is."""
        return self.request.request_id

    @property
    def stop_reason(self) -> int | str | None:
        """The stop id that ended it."""
        return self.request.stop_reason

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return max(self.request.num_cached_tokens, 0)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts of this moment, and two that only grow: `num_preemptions` and `num_prefix_hit_tokens`.

    The pages in use are those that a request holds; `num_evictable_pages` are kept by the prefix cache alone.
    """

    num_waiting: int
    num_running: int
    num_preemptions: int
    num_prefix_hit_tokens: int
    num_used_pages: int
    num_free_pages: int
    num_evictable_pages: int


class _Launched(NamedTuple):
    step_id: int
    requests: tuple[Request, ...]


class Scheduler:
    """Owns every request from `add` to its end. The fairness policy is stated in `policy`.

    Args:
        config: `max_num_seqs`, `token_budget`, `max_queue_len`, `prompts_first` are used here.
        allocator: the pool.
        prefix_cache: over the same allocator; `NoPrefixCache` for none.
        page_size: tokens a page.
        max_model_len: context limit, tokens; resolved (a model may allow less than the config asks for).
        max_pages_per_row: pages that a row may own.
        draft_planner: says what decode rows verify; None for one token a row and step. Not under overlap: drafts are
            planned for rows whose tokens are all known.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: PageAllocator,
        prefix_cache: PrefixCache,
        *,
        page_size: int,
        max_model_len: int,
        max_pages_per_row: int,
        draft_planner: DraftPlanner | None = None,
    ) -> None:
        self._max_queue_len = config.max_queue_len
        self._max_model_len = max_model_len
        self._pool_len = min(allocator.capacity, max_pages_per_row) * page_size
        self._allocator = allocator
        self._prefix_cache = prefix_cache
        self._requests: dict[str, Request] = {}
        self._queue = WaitingQueue()
        self._running = RunningSet(config.max_num_seqs, allocator, prefix_cache, page_size, draft_planner)
        self._launched: deque[_Launched] = deque()
        # A decode row takes one token of a step. With no more requests than tokens, all of them have room in each step
        # and one token at least is left for whoever still computes its prompt.
        max_num_running = min(config.max_num_seqs, config.token_budget)
        self._planner = PromptPlanner(
            self._queue, self._running, max_num_running, spares_pages=bool(config.prompts_first)
        )
        most_waited_steps = most_steps_waited(max_num_running, max_model_len, config.token_budget)
        self._filler = StepFiller(
            self._running, self._planner, config.token_budget, most_waited_steps if config.prompts_first else 0
        )
        self._draft_room = DraftRoom(draft_planner, self._running)
        self._num_arrivals = 0
        self._num_steps = 0

    def has_unfinished_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a new request; lowers its `max_new_tokens` to what the context and the pool leave.

        Raises:
            InvalidRequestError: it can never be served, or its id is in use.
            QueueFullError: `max_queue_len` requests wait already.
        """
        if request.request_id in self._requests:
            raise InvalidRequestError("request_id", request.request_id, "is in use by a request that has not finished")
        check_request(request, self._max_model_len, self._pool_len)
        if self._max_queue_len is not None and len(self._queue) >= self._max_queue_len:
            raise QueueFullError("max_queue_len", self._max_queue_len, "the queue is full; try again later")
        request.max_new_tokens = capped_max_new_tokens(request, self._max_model_len, self._pool_len)
        request.stop_ids = stop_ids_of(request)
        request.arrival_index = self._num_arrivals
        request.queued_step = self._num_steps
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._queue.add(request)

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next step and count it as launched; None when nothing can run before the next `update`.

        Every batch must be answered by `update`, in order, or given up with all others by `finish_running`.
        """
        self._running.grow_decoding()
        self._requeue_preempted()
        oldest = self._launched[0].step_id if self._launched else self._num_steps
        decode, chunks = self._filler.fill(self._num_steps, oldest)
        if not decode.rows and not chunks:
            self._end_unfittable()
            return None
        drafts = None if chunks else self._draft_room.plan(decode)
        self._draft_room.reserve_lookahead(decode.requests, drafts, chunks)
        cached_lens = []
        for request in decode.requests:
            cached_lens.append(request.cached_len)
            request.cached_len += 1
            request.num_pending_tokens += 1
        appends = self._take_page_appends()
        if drafts is None:
            batch = build_batch(self._num_steps, decode, tuple(cached_lens), chunks, appends)
        else:
            for request, num_drafts in zip(decode.requests, drafts.num_drafts, strict=True):
                request.cached_len += num_drafts
            batch = build_verify_batch(self._num_steps, decode, tuple(cached_lens), drafts, appends)
        self._launch(decode, chunks)
        return batch

    def update(self, batch: ScheduledBatch, token_ids: Sequence[int]) -> list[RequestUpdate | None]:
        """Take in the result of the oldest launched step.

        Args:
            batch: what `schedule` returned.
            token_ids: one for each request of the batch with `samples` True, in batch order.

        Returns:
            One entry for each request of the batch, in order; None for one that ended meanwhile: its token is dropped.
        """
        if batch.mode is not ForwardMode.DECODE:
            return self.update_accepted(batch, [(token_id,) for token_id in token_ids])
        results: list[RequestUpdate | None] = []
        requests = self._take_launched(batch)
        for request, token_id, cached_len in zip(requests, token_ids, batch.cached_lens, strict=True):
            output = request.output_token_ids
            if (
                request.status is RequestStatus.RUNNING
                and token_id not in request.stop_ids
                and len(output) + 1 < request.max_new_tokens
            ):  # the common case, written out because it is most of the host's work in a large decode step
                output.append(token_id)
                request.num_pending_tokens -= 1
                request.resolved_len = cached_len + 1
                results.append(RequestUpdate(request, (token_id,), None))
            else:
                results.append(self._advance(request, (token_id,), cached_len + 1, 0))
        return results

    def update_accepted(self, batch: ScheduledBatch, accepted: Sequence[Sequence[int]]) -> list[RequestUpdate | None]:
        """`update` for steps that yield several tokens a request: the accepted drafts and one more.

        Args:
            batch: what `schedule` returned.
            accepted: for each request with `samples` True, at least one token; cut here where the request ends.
        """
        assert len(accepted) == sum(batch.samples), f"{len(accepted)} results for {sum(batch.samples)} sampled rows"
        results: list[RequestUpdate | None] = []
        if batch.mode is ForwardMode.VERIFY:
            rows = zip(self._take_launched(batch), accepted, batch.num_draft_tokens, batch.cached_lens, strict=True)
            for request, tokens, num_drafts, cached_len in rows:
                num_rejected = num_drafts + 1 - len(tokens)
                results.append(self._advance(request, tokens, cached_len + len(tokens), num_rejected, num_drafts))
            return results
        blocks = iter(accepted)
        for index, request in enumerate(self._take_launched(batch)):
            tokens = next(blocks) if batch.samples[index] else ()
            num_computed = batch.query_lens[index]
            num_rejected = 1 - len(tokens) if tokens else 0
            resolved_len = batch.cached_lens[index] + num_computed - num_rejected
            results.append(self._advance(request, tokens, resolved_len, num_rejected))
        return results

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> bool:
        """End a request at any moment: stop strings, aborts, errors. Returns whether it was live; twice is harmless."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.stop_reason = stop_reason
        self._end(request, reason)
        return True

    def finish_running(self, reason: FinishReason) -> list[str]:
        """End every running request after a step broke, and forget all launched steps; waiting requests stay.

        Only what earlier, finished steps computed goes to the prefix cache.

        Returns:
            Ids of the requests that ended.
        """
        self._launched.clear()
        for request in self._queue:
            request.num_pending_tokens = 0  # a preempted one computes the lost token again
        ended = list(self._running)
        for request in ended:
            self._end(request, reason)
        return [request.request_id for request in ended]

    def take_ended_early(self) -> list[RequestUpdate]:
        """Requests that ended in `schedule` because no page could be had for them, since the last call.

        Only possible when someone else took pages from the pool: `add` refuses and caps what does not fit.
        """
        ended, self._running.ended_early = self._running.ended_early, []
        return [RequestUpdate(request, (), request.finish_reason) for request in ended]

    def forget_prefixes(self) -> None:
        """Empty the prefix cache: the pages, or the weights that made them, are gone. Nothing may be running."""
        assert not self._requests, "a running request would insert its pages again"
        self._prefix_cache.reset()

    def stats(self) -> SchedulerStats:
        """The counters."""
        num_evictable = self._prefix_cache.num_evictable
        num_free = self._allocator.num_free
        return SchedulerStats(
            num_waiting=len(self._queue),
            num_running=len(self._running),
            num_preemptions=self._running.num_preemptions,
            num_prefix_hit_tokens=self._planner.num_prefix_hit_tokens,
            num_used_pages=self._allocator.capacity - num_free - num_evictable,
            num_free_pages=num_free,
            num_evictable_pages=num_evictable,
        )

    def check_invariants(self) -> None:
        """Assert that every page, row and request is in exactly one place, and at idle that the pool is whole."""
        self._allocator.check_invariants()
        self._prefix_cache.check_invariants()
        self._running.check_invariants()
        for request in self._requests.values():
            is_waiting = request in self._queue
            assert is_waiting != (request.status is RequestStatus.RUNNING), f"{request.request_id}: {request.status}"
            if is_waiting:
                assert not request.pages and request.cached_len == request.row == 0, f"{request} holds what it lost"
            num_launched = sum(request in step.requests for step in self._launched)
            assert 0 <= request.num_pending_tokens <= num_launched, f"{request} waits for a token that never comes"
        assert len(self._requests) == len(self._queue) + len(self._running), "a request is in no place or in two"
        stats = self.stats()
        if not self._requests:
            assert stats.num_used_pages == 0, f"{stats.num_used_pages} pages are lost"

    def _requeue_preempted(self) -> None:
        for request in self._running.preempted:
            request.preempted_step = self._num_steps
            self._queue.add(request)
        self._running.preempted.clear()
        for request in self._running.ended_early:
            self._requests.pop(request.request_id, None)

    def _end_unfittable(self) -> None:
        # Nothing runs and nothing is on the way, so nothing will be given back: who is first now can never be served.
        request = self._queue.first(by_age)
        if request is None or self._running or self._launched:
            return
        self._queue.remove(request)
        del self._requests[request.request_id]
        self._running.end_stuck(request)

    def _take_page_appends(self) -> tuple[PageAppend, ...]:
        grown = self._running.grown
        if not grown:
            return ()
        appends = tuple(PageAppend(owner.row, start, tuple(owner.pages[start:])) for owner, start in grown.items())
        grown.clear()
        return appends

    def _launch(self, decode: DecodeColumns, chunks: Sequence[PromptChunk]) -> None:
        requests = decode.requests
        if chunks:
            requests += tuple(chunk.request for chunk in chunks)
        for chunk in chunks:
            if chunk.ends_prompt:
                chunk.request.num_pending_tokens += chunk.samples
                self._running.start_decoding(chunk.request)
        self._launched.append(_Launched(self._num_steps, requests))
        self._num_steps += 1

    def _take_launched(self, batch: ScheduledBatch) -> tuple[Request, ...]:
        launched = self._launched.popleft()
        assert launched.step_id == batch.step_id, f"update of step {batch.step_id}, but {launched.step_id} comes first"
        return launched.requests

    def _advance(
        self, request: Request, tokens: Sequence[int], resolved_len: int, num_rejected: int, num_drafts: int = 0
    ) -> RequestUpdate | None:
        """Account for one request's part of a finished step."""
        if request.status is RequestStatus.FINISHED:
            return None
        is_running = request.status is RequestStatus.RUNNING  # else preempted since: its pages are gone
        if is_running:
            request.cached_len -= num_rejected
            request.resolved_len = resolved_len
        num_before = len(request.output_token_ids)
        reason = None
        if tokens:
            request.num_pending_tokens -= 1
            reason = append_tokens(request, tokens)
        elif request.wants_pooling and resolved_len == request.num_prompt_tokens:
            reason = FinishReason.STOP
        if reason is not None:
            self._end(request, reason)
        elif is_running and num_before == 0:
            self._prefix_cache.insert(request.prompt_token_ids[:resolved_len], request.pages)
        new_token_ids = tuple(request.output_token_ids[num_before:])
        num_accepted = min(len(tokens) - 1, len(new_token_ids)) if num_drafts else 0
        return RequestUpdate(request, new_token_ids, reason, num_drafts, num_accepted)

    def _end(self, request: Request, reason: FinishReason) -> None:
        # See Note [pages may be freed under a launched step].
        if request.status is RequestStatus.RUNNING:
            self._running.stop(request)
        else:
            self._queue.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]
