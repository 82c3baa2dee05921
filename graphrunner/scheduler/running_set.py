"""The running requests: who owns which row and which pages.

A running request is in exactly one of three lists:

    prefilling   computes prompt tokens (or, resumed after preemption, prompt and output tokens)
    decoding     one token a step
    draining     everything it may compute is launched; only the last results are awaited (overlap)

Note [pages may be freed under a launched step]
    A step that is launched but not finished may still write into pages and rows that were given back meanwhile. That is
    safe because the device runs steps in order: whoever gets the page or the row next fills it in a later step.
"""

from heapq import heapify, heappop, heappush
from itertools import chain

from graphrunner.core.draft_plan import DraftPlanner
from graphrunner.core.request import FinishReason, Request, RequestStatus
from graphrunner.kvcache.page_allocator import PageAllocator
from graphrunner.kvcache.prefix_cache import PrefixCache
from graphrunner.scheduler.policy import choose_victim


class RunningSet:
    """Rows and pages of the running requests, and what to do when pages run out.

    Args:
        max_num_seqs: rows 1 .. max_num_seqs are handed out; row 0 is the dummy.
        allocator, prefix_cache: the pool; nobody else may give pages of running requests back.
        page_size: tokens a page.
        draft_planner: knows which pages lack something for later requests' drafts; None where nothing drafts.
    """

    def __init__(
        self,
        max_num_seqs: int,
        allocator: PageAllocator,
        prefix_cache: PrefixCache,
        page_size: int,
        draft_planner: DraftPlanner | None = None,
    ) -> None:
        self._draft_planner = draft_planner
        self._allocator = allocator
        self._prefix_cache = prefix_cache
        self._page_size = page_size
        self._free_rows = list(range(1, max_num_seqs + 1))
        heapify(self._free_rows)  # the lowest row first, so that the rows in use stay close together
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.draining: list[Request] = []
        self.is_decoding_changed = True
        self.num_preemptions = 0
        self.preempted: list[Request] = []  # since the caller last took them
        self.ended_early: list[Request] = []  # finished for want of pages, since the caller last took them
        self.grown: dict[Request, int] = {}  # decode rows with new pages, and how many they had before

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding) + len(self.draining)

    def __iter__(self) -> chain[Request]:
        return chain(self.prefilling, self.decoding, self.draining)

    @property
    def num_available_pages(self) -> int:
        """Pages that are free or can be made so without preempting anyone."""
        return self._allocator.num_free + self._prefix_cache.num_evictable

    def start(self, request: Request, can_hit_prefix: bool, num_spare_pages: int) -> bool:
        """Give a waiting request a row and the pages of all its known tokens and the next one, if there are enough.

        Args:
            can_hit_prefix: whether pages of the prefix cache may stand in for computing.
            num_spare_pages: how many pages must be left over.
        """
        seq_len = min(request.num_tokens + 1, request.final_len)
        num_pages = -(-seq_len // self._page_size)
        known = [*request.prompt_token_ids, *request.output_token_ids]
        hit = self._prefix_cache.match(known) if can_hit_prefix else []
        self._prefix_cache.acquire(hit)
        num_new = num_pages - len(hit)
        if num_new + num_spare_pages > self.num_available_pages:
            self._prefix_cache.release(hit)
            return False
        try:
            self._evict_down_to(num_new)
            request.pages = hit + self._allocator.allocate(num_new)
        except BaseException:  # a broken promise elsewhere must not cost pages too
            self._prefix_cache.release(hit)
            raise
        request.cached_len = request.resolved_len = len(hit) * self._page_size
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.cached_len
        request.row = heappop(self._free_rows)
        request.status = RequestStatus.RUNNING
        self.prefilling.append(request)
        return True

    def start_decoding(self, request: Request) -> None:
        """Move a request whose last known token is launched from prefilling to decoding, or to draining."""
        self.prefilling.remove(request)
        if request.wants_pooling:
            self.draining.append(request)
            return
        self._set_decode_until(request)
        self.decoding.append(request)
        self.is_decoding_changed = True

    def grow_decoding(self) -> None:
        """Make every decode row ready for one more token: a page where it needs one, none left that is at its end.

        Preempts when pages run out; `preempted`, `ended_early` and `grown` say what happened.
        """
        due = [request for request in self.decoding if request.cached_len >= request.decode_until]
        if not due:
            return
        # Best first: the victim of a row stands after it, so a row that just got its page is never one.
        due.sort(key=lambda request: (request.priority, request.arrival_index))
        for request in due:
            if request.status is not RequestStatus.RUNNING:
                continue  # gave its pages to one before it
            if request.cached_len >= request.final_len:
                self._drain(request)
            elif self._make_room(request):
                self.grown.setdefault(request, len(request.pages))
                request.pages += self._allocator.allocate(1)
                self._set_decode_until(request)

    def reserve(self, request: Request, num_tokens: int) -> int:
        """Try to have pages for `num_tokens` more tokens of a decode row, its drafts; nobody is preempted for them.

        Returns:
            For how many there are pages; at least 1 after `grow_decoding`.
        """
        if request.cached_len + num_tokens <= len(request.pages) * self._page_size:
            return num_tokens
        missing = -(-(request.cached_len + num_tokens) // self._page_size) - len(request.pages)
        self._evict_down_to(missing)
        count = min(missing, self._allocator.num_free)
        if count:
            self.grown.setdefault(request, len(request.pages))
            request.pages += self._allocator.allocate(count)
            self._set_decode_until(request)
        return min(num_tokens, len(request.pages) * self._page_size - request.cached_len)

    def stop(self, request: Request) -> None:
        """Take row and pages away; full pages whose KV is known to be computed go to the prefix cache."""
        # Only resolved steps count: a launched one may still fail, and its sampled token is not known here.
        num_known = request.resolved_len
        if self._draft_planner is not None:
            num_known = self._draft_planner.filled_len(request)
        known = [*request.prompt_token_ids, *request.output_token_ids][:num_known]
        self._prefix_cache.insert_and_release(known, request.pages)
        request.pages = []
        heappush(self._free_rows, request.row)
        request.row = 0
        for members in (self.prefilling, self.draining):
            if request in members:
                members.remove(request)
                return
        self.decoding.remove(request)
        self.is_decoding_changed = True

    def end_stuck(self, request: Request) -> None:
        """Finish a request, running or not, that can never get the pages it needs."""
        if request.status is RequestStatus.RUNNING:
            self.stop(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = FinishReason.LENGTH
        self.ended_early.append(request)

    def check_invariants(self) -> None:
        """Assert that rows and pages of the running requests are their own and enough."""
        rows = [request.row for request in self]
        num_rows = len(rows) + len(self._free_rows)
        assert len({0, *rows, *self._free_rows}) == num_rows + 1, "a row has two users"
        holders: dict[int, int] = {}
        for request in self:
            assert request.status is RequestStatus.RUNNING, f"{request.request_id} runs as {request.status}"
            assert request.cached_len <= len(request.pages) * self._page_size, f"{request.request_id} outgrew its pages"
            assert request.resolved_len <= request.cached_len, f"{request.request_id} resolved more than was launched"
            for page in request.pages:
                holders[page] = holders.get(page, 0) + 1
        for page, count in holders.items():
            num_refs = self._allocator.num_refs(page)
            assert num_refs - count in (0, 1), f"page {page}: {count} requests, {num_refs} owners"

    def _make_room(self, request: Request) -> bool:
        """Have one page free for a decode row; False when it lost its own place over it."""
        while self._allocator.num_free == 0:
            if self._prefix_cache.evict(1):
                continue
            victim = choose_victim(self)
            if len(self) > 1:
                self._preempt(victim)
            elif request.num_pending_tokens:
                request.max_new_tokens = len(request.output_token_ids) + request.num_pending_tokens
                self._drain(request)  # its last token is on the way and ends it
            else:
                self.end_stuck(request)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        self.stop(victim)
        victim.cached_len = victim.resolved_len = 0
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(victim)

    def _drain(self, request: Request) -> None:
        self.decoding.remove(request)
        self.draining.append(request)
        self.is_decoding_changed = True

    def _evict_down_to(self, num_free: int) -> None:
        missing = num_free - self._allocator.num_free
        if missing > 0:
            self._prefix_cache.evict(missing)

    def _set_decode_until(self, request: Request) -> None:
        request.decode_until = min(len(request.pages) * self._page_size, request.final_len)
