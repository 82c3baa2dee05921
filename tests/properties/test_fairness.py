"""The fairness policy of graphrunner/scheduler/policy.py, as promises with numbers."""

from math import ceil

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from paged_fake import FakeEngine

from graphrunner.core.request import FinishReason
from graphrunner.scheduler.policy import AGEING_STEPS, by_age

MAX_SHORT_LEN = 8


def big_engine(chunk_len: int, **setup) -> FakeEngine:
    return FakeEngine(num_pages=4000, chunk_len=chunk_len, max_num_seqs=64, max_model_len=4096, **setup)


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def steps_until(engine: FakeEngine, request_id: str, limit: int = 2000) -> int:
    """Steps until the first token of a request."""
    for num_steps in range(1, limit):
        engine.step()
        if engine.tokens(request_id):
            return num_steps
    raise AssertionError(f"{request_id} got no token in {limit} steps")


@pytest.mark.parametrize("num_long", [1, 2, 5])
def test_short_prompt_is_not_stuck_behind_long_ones(num_long: int) -> None:
    engine = big_engine(chunk_len=64)
    long_ids = [engine.add(prompt(1000, 1000 * i), 4) for i in range(num_long)]
    for _ in range(2):
        engine.step()
    short = engine.add(prompt(20, 9000), 4)
    assert steps_until(engine, short) == 1
    assert not any(engine.tokens(request_id) for request_id in long_ids)
    engine.run()


def test_long_prompt_alone_gets_the_whole_budget() -> None:
    engine = big_engine(chunk_len=64)
    assert steps_until(engine, engine.add(prompt(640), 1)) == 10


def test_equal_prompts_are_served_in_order_and_not_in_turns() -> None:
    engine = big_engine(chunk_len=64)
    first, second = engine.add(prompt(640), 1), engine.add(prompt(640, 1000), 1)
    assert steps_until(engine, first) == 10
    assert steps_until(engine, second) == 10


def test_long_prompt_goes_on_at_half_speed_under_a_flood_of_short_ones() -> None:
    engine = big_engine(chunk_len=64)
    long_id = engine.add(prompt(640), 1)
    for num_steps in range(1, 100):
        for i in range(8):
            engine.add(prompt(8, 1000 + 100 * num_steps + 10 * i), 1)
        engine.step()
        if engine.tokens(long_id):
            break
    assert num_steps <= 20


def test_better_priority_goes_first() -> None:
    engine = big_engine(chunk_len=32)
    humble = [engine.add(prompt(32, 100 * i), 1, priority=1) for i in range(4)]
    urgent = engine.add(prompt(32, 5000), 1, priority=0)
    assert steps_until(engine, urgent) == 1
    assert not any(engine.tokens(request_id) for request_id in humble)


def test_request_that_needs_the_whole_pool_is_not_overtaken_for_ever() -> None:
    engine = FakeEngine(num_pages=9, page_size=16, chunk_len=64, max_num_seqs=4)
    for i in range(3):
        engine.add(prompt(4, 10 * i), 12)
    engine.step()
    large = engine.add(prompt(120, 1000), 4)
    for num_steps in range(1, 60):
        engine.add(prompt(4, 2000 + 10 * num_steps), 12)
        engine.step()
        if engine.tokens(large):
            break
    assert num_steps <= 20
    engine.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_resumed_requests_do_not_lose_their_pages_at_once(depth: int) -> None:
    """They wait for one spare page a running request, so that being preempted stays the exception."""
    engine = FakeEngine(num_pages=12, depth=depth)
    for i in range(16):
        engine.add((i, *prompt(15 + i % 2, 100)), 60)
    engine.run()
    assert 1 <= engine.scheduler.stats().num_preemptions <= 16


@settings(max_examples=60, deadline=None)
@given(
    prompts_first=st.booleans(),
    chunk_len=st.integers(2, 16),
    subject_len=st.integers(1, 120),
    priority=st.integers(0, 2),
    backlog=st.lists(st.integers(1, 40), max_size=6),
    arrivals=st.lists(
        st.lists(st.tuples(st.integers(1, MAX_SHORT_LEN), st.integers(0, 2)), max_size=3), min_size=1, max_size=20
    ),
)
def test_nothing_starves(*, prompts_first, chunk_len, subject_len, priority, backlog, arrivals) -> None:
    """The stated bound: whoever stands before it by age, plus its own tokens, at half the budget a step.

    Everybody wants one token, so that the whole budget goes to prompts. The arrivals repeat without end.
    """
    engine = big_engine(chunk_len, has_prefix_cache=False, prompts_first=prompts_first)
    ahead_len = sum(backlog)
    for index, length in enumerate(backlog):
        engine.add(prompt(length, 100 * index), 1)
    subject_id = engine.add(prompt(subject_len, 5000), 1, priority)
    subject = engine.served[subject_id].request
    num_steps = 0
    while engine.reason(subject_id) is None:
        for length, other_priority in arrivals[num_steps % len(arrivals)]:
            request = engine.served[engine.add(prompt(length, 7000), 1, other_priority)].request
            if by_age(request, 0) < by_age(subject, 0):
                assert (
                    other_priority < priority and request.queued_step < AGEING_STEPS * (priority - other_priority) + 1
                )
                ahead_len += length
        engine.step()
        num_steps += 1
        # A row may have to come free first: at most `chunk_len` short prompts are running then.
        bound = ceil((ahead_len + subject_len) / (chunk_len // 2)) + 2 * MAX_SHORT_LEN
        assert num_steps <= bound, f"{num_steps} steps, {bound} promised"
    for request_id in engine.served:
        engine.scheduler.finish(request_id, FinishReason.ABORT)
    engine.check_pool()
