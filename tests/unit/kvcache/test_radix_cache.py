"""The prefix cache on its own: what it finds, what it keeps, what it gives up first."""

import random

import pytest

from graphrunner.kvcache.page_allocator import PageAllocator
from graphrunner.kvcache.prefix_cache import NoPrefixCache
from graphrunner.kvcache.radix_cache import RadixCache

PAGE_SIZE = 4


@pytest.fixture
def allocator() -> PageAllocator:
    return PageAllocator(33)


@pytest.fixture
def cache(allocator: PageAllocator) -> RadixCache:
    return RadixCache(allocator, PAGE_SIZE)


def keep(cache: RadixCache, allocator: PageAllocator, tokens) -> list[int]:
    """Pages of a request that computed `tokens` and ended."""
    pages = allocator.allocate(-(-len(tokens) // PAGE_SIZE))
    cache.insert_and_release(tokens, pages)
    cache.check_invariants()
    return pages


@pytest.mark.parametrize(
    ("prompt_len", "num_hit_pages"), [(1, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2), (12, 2), (13, 3)]
)
def test_a_prompt_never_hits_wholly(cache, allocator, prompt_len, num_hit_pages) -> None:
    tokens = list(range(13))
    pages = keep(cache, allocator, tokens)
    assert cache.match(tokens[:prompt_len]) == pages[:num_hit_pages]


def test_only_full_pages_are_kept(cache, allocator) -> None:
    keep(cache, allocator, [1, 2, 3, 4, 5, 6])
    assert (cache.num_cached_pages, cache.num_evictable) == (1, 1)
    assert allocator.num_free == allocator.capacity - 1


def test_branches_share_their_stem(cache, allocator) -> None:
    stem = [1, 2, 3, 4]
    first = keep(cache, allocator, [*stem, 5, 6, 7, 8])
    second = keep(cache, allocator, [*stem, 9, 9, 9, 9])
    assert cache.num_cached_pages == 3
    assert cache.match([*stem, 9, 9, 9, 9, 0]) == [first[0], second[1]]
    assert cache.match([*stem, 0, 0, 0, 0, 0]) == [first[0]]
    assert cache.match([0, *stem]) == []


def test_acquired_pages_are_not_evicted(cache, allocator) -> None:
    tokens = list(range(12))
    pages = keep(cache, allocator, tokens)
    cache.acquire(pages[:2])
    assert cache.num_evictable == 1
    assert cache.evict(10) == 1
    assert cache.match([*tokens, 0]) == pages[:2]
    cache.release(pages[:2])
    assert cache.evict(10) == 2
    assert allocator.num_free == allocator.capacity


def test_eviction_takes_leaves_least_recently_used_first(cache, allocator) -> None:
    old = keep(cache, allocator, [1] * 8)
    new = keep(cache, allocator, [2] * 8)
    cache.acquire(old)
    cache.release(old)  # used again: now the other one is the oldest
    assert cache.evict(1) == 1
    assert cache.match([2] * 9) == new[:1], "the leaf goes, its parent stays"
    assert cache.evict(1) == 1
    assert cache.match([2] * 9) == []
    assert cache.match([1] * 9) == old


def test_running_request_shares_below_its_own_pages_only(cache, allocator) -> None:
    first, second = allocator.allocate(2), allocator.allocate(2)
    cache.insert([1] * 4, first)
    cache.insert([1] * 8, second)  # computed the same page at the same time
    assert cache.num_cached_pages == 1
    cache.insert([1] * 8, first)
    assert cache.num_cached_pages == 2 and cache.num_evictable == 0
    cache.release(second)
    cache.release(first)
    assert cache.num_evictable == 2
    cache.check_invariants()


def test_doubles_are_dropped_at_the_end(cache, allocator) -> None:
    first, second = allocator.allocate(2), allocator.allocate(3)
    cache.insert([1] * 8, first)
    cache.insert_and_release([1] * 12, second)
    assert cache.match([1] * 13) == [*first, second[2]]
    cache.check_invariants()
    cache.insert_and_release([1] * 8, first)
    cache.check_invariants()
    assert allocator.num_free + cache.num_evictable == allocator.capacity


def test_reset_leaves_used_pages_to_their_owner(cache, allocator) -> None:
    tokens = list(range(8))
    pages = keep(cache, allocator, tokens)
    cache.acquire(pages[:1])
    cache.reset()
    assert cache.match([*tokens, 0]) == [] and cache.num_cached_pages == 0
    assert allocator.num_free == allocator.capacity - 1
    cache.release(pages[:1])
    assert allocator.num_free == allocator.capacity
    cache.check_invariants()


def test_matching_what_was_not_acquired_is_loud(cache, allocator) -> None:
    with pytest.raises(AssertionError):
        cache.acquire(allocator.allocate(1))


def test_no_cache_keeps_nothing(allocator) -> None:
    cache = NoPrefixCache(allocator)
    pages = allocator.allocate(3)
    cache.insert([1] * 12, pages)
    cache.insert_and_release([1] * 12, pages)
    cache.release([])
    cache.acquire([])
    cache.reset()
    cache.check_invariants()
    assert cache.match([1] * 12) == [] and cache.evict(3) == cache.num_evictable == cache.num_cached_pages == 0
    assert allocator.num_free == allocator.capacity


@pytest.mark.parametrize("seed", range(30))
def test_match_agrees_with_a_list_of_sequences(seed: int) -> None:
    """The oracle remembers every sequence and looks for the longest common prefix in whole pages."""
    rng = random.Random(seed)
    page_size = rng.choice((1, 2, 5))
    allocator = PageAllocator(500)
    cache = RadixCache(allocator, page_size)
    kept: list[list[int]] = []
    for _ in range(40):
        tokens = rng.choices((0, 1), k=rng.randint(1, 12))
        common = max((_common_len(tokens, other) for other in kept), default=0)
        expected = min(common // page_size, (len(tokens) - 1) // page_size)
        hit = cache.match(tokens)
        assert len(hit) == expected
        cache.acquire(hit)
        pages = hit + allocator.allocate(-(-len(tokens) // page_size) - len(hit))
        cache.insert_and_release(tokens, pages)
        kept.append(tokens[: len(tokens) // page_size * page_size])
        cache.check_invariants()
        allocator.check_invariants()


def _common_len(first: list[int], second: list[int]) -> int:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length
