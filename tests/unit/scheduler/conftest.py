"""A scheduler and requests with small numbers."""

from collections.abc import Callable

import pytest

from graphrunner.config.engine_config import SchedulerConfig
from graphrunner.core.request import Request
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.kvcache.page_allocator import PageAllocator
from graphrunner.kvcache.radix_cache import RadixCache
from graphrunner.scheduler.scheduler import Scheduler

EOS = 2


@pytest.fixture
def make_request() -> Callable[..., Request]:
    def make(request_id: str = "a", prompt_len: int = 4, max_tokens: int = 8, first: int = 10, **fields) -> Request:
        params = fields.pop("params", {})
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(range(first, first + prompt_len)),
            sampling_params=SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params}),
            max_new_tokens=max_tokens,
            eos_token_ids=frozenset({EOS}),
            **fields,
        )

    return make


@pytest.fixture
def make_scheduler() -> Callable[..., Scheduler]:
    def make(
        *, num_pages: int = 33, page_size: int = 4, max_model_len: int = 64, max_pages_per_row: int = 16, **config
    ) -> Scheduler:
        allocator = PageAllocator(num_pages)
        return Scheduler(
            SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, **config}),
            allocator,
            RadixCache(allocator, page_size),
            page_size=page_size,
            max_model_len=max_model_len,
            max_pages_per_row=max_pages_per_row,
        )

    return make
