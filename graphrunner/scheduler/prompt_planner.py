"""Splits the prompt budget of a step, and lets waiting requests in. The rules are stated in `policy`."""

from graphrunner.core.request import Request
from graphrunner.core.scheduled_batch import RowInit
from graphrunner.scheduler.batch_builder import PromptChunk, row_init_of, wants_prompt_logprobs
from graphrunner.scheduler.policy import Order, WaitingQueue, by_age, by_length, split_budget
from graphrunner.scheduler.running_set import RunningSet


class PromptPlanner:
    """Chooses the prompt chunks of each step.

    Args:
        queue: requests without pages; admitted ones leave it.
        running: where they go.
        max_num_running: most requests running at once.
        spares_pages: let new requests in, too, only where a page for each running one is left over.
    """

    def __init__(self, queue: WaitingQueue, running: RunningSet, max_num_running: int, *, spares_pages: bool) -> None:
        self._queue = queue
        self._running = running
        self._max_num_running = max_num_running
        self._spares_pages = spares_pages
        self._blocked: Request | None = None  # first by age, and no row or pages for it: no later one is let past
        self._num_available_when_blocked = 0
        self.num_prefix_hit_tokens = 0

    @property
    def has_prompts(self) -> bool:
        """Whether any request has prompt tokens left to compute."""
        return bool(self._queue or self._running.prefilling)

    def plan(self, num_tokens: int, step_id: int, oldest_launched_step: int) -> list[PromptChunk]:
        """Chunks of at most `num_tokens` tokens together; counts them as launched.

        Args:
            num_tokens: the step's budget for prompts.
            step_id: the step.
            oldest_launched_step: the first step whose result is not in yet, or `step_id`.
        """
        step = _Step(oldest_launched_step)
        age_share, length_share = split_budget(num_tokens, step_id)
        unused = self._give(step, age_share, by_age)
        unused = self._give(step, length_share + unused, by_length)
        if unused:  # the shortest may not be let in yet, while the oldest, with a share of 0, was not even tried
            self._give(step, unused, by_age)
        return self._launch_chunks(step)

    def _give(self, step: "_Step", num_tokens: int, order: Order) -> int:
        """Hand out tokens in one order, to running and waiting requests alike; returns what nobody could use."""
        running = sorted(
            (request for request in self._running.prefilling if step.remaining_len(request) > 0),
            key=lambda request: order(request, step.remaining_len(request)),
            reverse=True,
        )
        is_open = True
        while num_tokens > 0:
            waiting = self._queue.first(order) if is_open else None
            if waiting is not None and (not running or self._is_before(order, waiting, running[-1], step)):
                is_open = self._admit(waiting, step)
                if not is_open:
                    continue
                request = waiting
            elif running:
                request = running.pop()
            else:
                break
            length = min(num_tokens, step.remaining_len(request))
            step.lengths[request] = step.lengths.get(request, 0) + length
            num_tokens -= length
        return num_tokens

    def _is_before(self, order: Order, waiting: Request, running: Request, step: "_Step") -> bool:
        return order(waiting, waiting.num_tokens) < order(running, step.remaining_len(running))

    def _admit(self, request: Request, step: "_Step") -> bool:
        if self._blocked not in self._queue:
            self._blocked = None
        if self._blocked is not None and by_age(request, 0) > by_age(self._blocked, 0):
            return False
        num_available = self._running.num_available_pages
        # Nothing was given back since it did not fit: the answer is the same, and asking costs a walk over its prompt.
        is_hopeless = request is self._blocked and num_available <= self._num_available_when_blocked
        if (is_hopeless and len(self._running)) or not self._start(request, step):
            if request is self._queue.first(by_age):
                self._blocked = request
                self._num_available_when_blocked = num_available
            return False
        self._queue.remove(request)
        step.row_inits[request] = row_init_of(request)
        return True

    def _start(self, request: Request, step: "_Step") -> bool:
        if len(self._running) >= self._max_num_running:
            return False
        if request.preempted_step > step.oldest_launched_step:
            return False  # a step launched before it lost its pages still owes it a token
        is_first_run = request.num_cached_tokens < 0
        can_hit_prefix = not (wants_prompt_logprobs(request) or request.wants_pooling)
        # A resumed request lost its pages to the running ones once; one spare page for each keeps it from losing them
        # again at the next page border. Where prompts go first, no row takes its next page while requests are let in.
        num_spare_pages = len(self._running) if self._spares_pages or request.num_preemptions else 0
        if not self._running.start(request, can_hit_prefix, num_spare_pages):
            return False
        if is_first_run:
            self.num_prefix_hit_tokens += request.num_cached_tokens
        return True

    def _launch_chunks(self, step: "_Step") -> list[PromptChunk]:
        chunks = []
        for request, length in step.lengths.items():
            start = request.cached_len
            request.cached_len += length
            ends_prompt = request.cached_len == request.num_tokens
            chunks.append(PromptChunk(request, start, length, ends_prompt, step.row_inits.get(request)))
        return chunks


class _Step:
    """What was handed out so far in one step."""

    def __init__(self, oldest_launched_step: int) -> None:
        self.oldest_launched_step = oldest_launched_step
        self.lengths: dict[Request, int] = {}
        self.row_inits: dict[Request, RowInit] = {}

    def remaining_len(self, request: Request) -> int:
        """Known tokens of the request that no step computes yet."""
        return request.num_tokens - request.cached_len - self.lengths.get(request, 0)
