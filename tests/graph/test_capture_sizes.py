import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphrunner.runner.capture_planner import plan_capture_sizes
from graphrunner.runner.capture_sizes import (
    bucket_for,
    default_decode_sizes,
    default_prefill_sizes,
    sparse_sizes,
    user_sizes,
)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 13, 100, 256, 300, 512])
def test_the_limit_is_always_captured(limit: int) -> None:
    sizes = default_decode_sizes(limit)
    assert sizes[-1] == limit and sizes == tuple(sorted(set(sizes)))
    assert all(bucket_for(count, sizes) is not None for count in range(1, limit + 1))


def test_default_lists() -> None:
    assert default_decode_sizes(7) == (1, 2, 4, 7)
    assert default_decode_sizes(300, largest_allowed=256)[-1] == 256
    assert default_decode_sizes(1024)[-1] == 512
    assert default_prefill_sizes(100)[-1] == 100
    assert sparse_sizes(default_prefill_sizes(100)) == (4, 8, 16, 32, 64, 100)
    assert sparse_sizes(default_decode_sizes(40)) == (1, 2, 4, 8, 16, 32, 40)
    assert default_prefill_sizes(8192)[-2:] == (2048, 8192)
    assert user_sizes([4, 1, 2, 99], limit=8) == (1, 2, 4)
    assert bucket_for(5, (1, 4)) is None


def padding(observed: list[int], sizes: tuple[int, ...]) -> int:
    return sum(min(size for size in sizes if size >= count) - count for count in observed)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 4))
def test_planner_equals_brute_force(observed: list[int], max_graphs: int) -> None:
    plan = plan_capture_sizes(observed, max_graphs)
    assert 1 <= len(plan) <= max_graphs
    candidates = sorted(set(observed))
    best = min(
        padding(observed, chosen)
        for count in range(1, max_graphs + 1)
        for chosen in itertools.combinations(candidates, count)
        if chosen[-1] == candidates[-1]
    )
    assert padding(observed, plan) == best


def test_planner_budgets() -> None:
    assert plan_capture_sizes([], 4) == ()
    assert plan_capture_sizes([1, 2, 3], 3, bytes_per_graph=10, max_bytes=15) == (3,)
    assert plan_capture_sizes([1, 2], 2, largest=64)[-1] == 64
