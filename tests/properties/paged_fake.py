"""A model without weights whose answers depend on every byte of KV that the scheduler makes it read.

The KV entry of a token is a hash of the token, its position and all entries before it, read through the page table; the
next token is a hash of all entries. A wrong page, a stale prefix or a page with two owners changes an answer.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import count

from graphrunner.config.engine_config import SchedulerConfig
from graphrunner.core.request import FinishReason, Request
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.kvcache.page_allocator import PageAllocator
from graphrunner.kvcache.prefix_cache import NoPrefixCache
from graphrunner.kvcache.radix_cache import RadixCache
from graphrunner.scheduler.scheduler import Scheduler

VOCAB_SIZE = 997
EOS_IDS = frozenset(range(0, VOCAB_SIZE, 23))
POISON = -1


def kv_entry(token_id: int, before: list[int]) -> int:
    """KV of a token that stands after the entries `before`."""
    return hash((token_id, len(before), tuple(before)))


def next_token(entries: list[int]) -> int:
    """What is sampled when these entries are all there is."""
    return hash((7, tuple(entries))) % VOCAB_SIZE


def solo(prompt: tuple[int, ...], num_tokens: int, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    """The answer to `prompt` when it runs alone, without pages."""
    entries: list[int] = []
    output: list[int] = []
    for token_id in prompt:
        entries.append(kv_entry(token_id, entries))
    while len(output) < num_tokens:
        output.append(next_token(entries))
        if output[-1] in stop_ids:
            break
        entries.append(kv_entry(output[-1], entries))
    return output


class PagedFakeModel:
    """Pages, page table and last tokens as a device would hold them; runs steps in launch order."""

    def __init__(self, num_pages: int, page_size: int, num_rows: int) -> None:
        self.page_size = page_size
        self.kv = [[POISON] * page_size for _ in range(num_pages)]
        self.page_table: list[list[int]] = [[] for _ in range(num_rows)]
        self.last_token = [POISON] * num_rows
        self.written: dict[int, list[tuple[int, int]]] = {}  # step -> (page, offset)

    def run(self, batch: ScheduledBatch) -> list[int]:
        """Tokens of the rows that sample."""
        for init in batch.row_inits:
            self.page_table[init.row] = list(init.pages)
            self.last_token[init.row] = POISON
        for append in batch.page_appends:
            assert append.start == len(self.page_table[append.row]), "pages leave a gap or overwrite"
            self.page_table[append.row] += append.pages
        sampled = []
        self.written[batch.step_id] = []
        inputs = iter(batch.input_ids or (-1,) * batch.num_tokens)
        columns = zip(batch.rows, batch.cached_lens, batch.query_lens, batch.samples, strict=True)
        for row, cached_len, query_len, is_sampled in columns:
            entries = [self._read(row, position) for position in range(cached_len)]
            for _ in range(query_len):
                token_id = next(inputs)
                if token_id == -1:
                    token_id = self.last_token[row]
                entries.append(kv_entry(token_id, entries))
                self._write(batch.step_id, row, len(entries) - 1, entries[-1])
            if is_sampled:
                self.last_token[row] = next_token(entries)
                sampled.append(self.last_token[row])
        return sampled

    def _read(self, row: int, position: int) -> int:
        return self.kv[self.page_table[row][position // self.page_size]][position % self.page_size]

    def spoil(self, batch: ScheduledBatch) -> None:
        """What the step wrote turns out to be garbage."""
        for page, offset in self.written[batch.step_id]:
            self.kv[page][offset] = POISON

    def _write(self, step_id: int, row: int, position: int, entry: int) -> None:
        page = self.page_table[row][position // self.page_size]
        assert page != 0, "a real token was written to the dummy page"
        self.kv[page][position % self.page_size] = entry
        self.written[step_id].append((page, position % self.page_size))


@dataclass
class Served:
    """One request and what came back for it."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class FakeEngine:
    """The engine's loop around a scheduler and a `PagedFakeModel`.

    Args:
        depth: how many steps may be launched before the oldest is resolved; 0 is no overlap.
    """

    def __init__(
        self,
        *,
        num_pages: int = 65,
        page_size: int = 16,
        max_num_seqs: int = 8,
        chunk_len: int = 64,
        max_model_len: int = 256,
        depth: int = 0,
        has_prefix_cache: bool = True,
        max_queue_len: int | None = None,
        prompts_first: bool = False,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=chunk_len,
            max_queue_len=max_queue_len,
            prompts_first=prompts_first,
        )
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(self.allocator, page_size) if has_prefix_cache else NoPrefixCache(self.allocator)
        self.scheduler = Scheduler(
            config,
            self.allocator,
            self.cache,
            page_size=page_size,
            max_model_len=max_model_len,
            max_pages_per_row=-(-max_model_len // page_size),
        )
        self.model = PagedFakeModel(num_pages, page_size, max_num_seqs + 1)
        self.depth = depth
        self.pending: deque[tuple[ScheduledBatch, list[int]]] = deque()
        self.served: dict[str, Served] = {}
        self.batches: list[ScheduledBatch] = []
        self._ids = count()

    def add(self, prompt: tuple[int, ...], max_tokens: int = 8, priority: int = 0, **params: object) -> str:
        """Queue a prompt; greedy, and past the end token unless said."""
        params = {"temperature": 0.0, "ignore_eos": True, **params}
        request = Request(
            request_id=f"r{next(self._ids)}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, **params),
            max_new_tokens=max_tokens,
            eos_token_ids=EOS_IDS,
            priority=priority,
        )
        self.scheduler.add(request)
        self.served[request.request_id] = Served(request)
        return request.request_id

    def step(self) -> ScheduledBatch | None:
        """Launch one step and resolve what is due."""
        batch = self.launch()
        while len(self.pending) > (self.depth if batch else 0):
            self.resolve()
        return batch

    def launch(self) -> ScheduledBatch | None:
        """Schedule and run; the tokens stay on the way."""
        batch = self.scheduler.schedule()
        self._record(self.scheduler.take_ended_early())
        if batch is not None:
            self.batches.append(batch)
            self.pending.append((batch, self.model.run(batch)))
        return batch

    def resolve(self) -> None:
        """Take in the oldest launched step."""
        batch, tokens = self.pending.popleft()
        self._record(update for update in self.scheduler.update(batch, tokens) if update is not None)

    def run(self, max_steps: int = 5000) -> None:
        """Until nothing is left; checks the pool at the end."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests() and not self.pending:
                break
            self.step()
        assert not self.scheduler.has_unfinished_requests(), "requests are stuck"
        self.check_pool()

    def abort(self, request_id: str) -> bool:
        """End a request from outside."""
        was_live = self.scheduler.finish(request_id, FinishReason.ABORT)
        if was_live:
            assert self.served[request_id].finish_reason is None, "ended twice"
            self.served[request_id].finish_reason = FinishReason.ABORT
        return was_live

    def break_pending(self) -> None:
        """The launched steps raise: what they wrote is garbage, what ran ends with an error."""
        for batch, _ in self.pending:
            self.model.spoil(batch)
        self.pending.clear()
        for request_id in self.scheduler.finish_running(FinishReason.ERROR):
            self.served[request_id].finish_reason = FinishReason.ERROR

    def check_pool(self) -> None:
        """At idle every page is free or evictable."""
        self.scheduler.check_invariants()
        assert self.allocator.num_free + self.cache.num_evictable == self.allocator.capacity

    def tokens(self, request_id: str) -> list[int]:
        """What came back so far."""
        return self.served[request_id].tokens

    def reason(self, request_id: str) -> FinishReason | None:
        """How it ended."""
        return self.served[request_id].finish_reason

    def _record(self, updates) -> None:
        for update in updates:
            served = self.served[update.request_id]
            assert served.finish_reason is None, f"{update.request_id} got an update after its end"
            served.tokens += update.new_token_ids
            served.finish_reason = update.finish_reason
