"""Prompts before decode rows: what a step holds, and the promises of graphrunner/scheduler/policy.py about the wait."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from paged_fake import FakeEngine, solo

from graphrunner.core.request import FinishReason
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.core.shape_key import ForwardMode
from graphrunner.scheduler.policy import most_steps_waited

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
DECODE, PREFILL, MIXED = ForwardMode.DECODE, ForwardMode.PREFILL, ForwardMode.MIXED


def engine_of(**setup) -> FakeEngine:
    return FakeEngine(**({"prompts_first": True, "has_prefix_cache": False} | setup))


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def add_all(engine: FakeEngine, lengths: list[int], max_tokens: int) -> list[str]:
    return [engine.add(prompt(length, 50 * index), max_tokens) for index, length in enumerate(lengths)]


def check_answers(engine: FakeEngine) -> None:
    for served in engine.served.values():
        request = served.request
        if served.finish_reason is FinishReason.LENGTH:
            assert served.tokens == solo(request.prompt_token_ids, request.max_new_tokens), request.request_id


def modes(batches: list[ScheduledBatch]) -> list[ForwardMode]:
    return [batch.mode for batch in batches]


@DEPTHS
@pytest.mark.parametrize("length", [16, 48, 80])
def test_equal_prompts_then_every_decode_step_with_all_of_them(depth: int, length: int) -> None:
    """Else the first row would be done before the last one had its second token."""
    engine = engine_of(depth=depth, chunk_len=32)
    add_all(engine, [length] * 6, 10)
    engine.run()
    num_prompt_steps = 6 * length // 32
    decode = engine.batches[num_prompt_steps:]
    assert modes(engine.batches) == [PREFILL] * num_prompt_steps + [DECODE] * len(decode)
    # Under overlap rows at their limit drain: the scheduler counts tokens, so no step is launched for nothing.
    assert [batch.num_reqs for batch in decode] == [6] * 9
    check_answers(engine)


@pytest.mark.parametrize(("tail_len", "mode"), [(26, MIXED), (27, PREFILL)])
def test_rows_go_along_where_all_of_them_have_room(tail_len: int, mode: ForwardMode) -> None:
    engine = engine_of(chunk_len=32)
    add_all(engine, [4] * 6, 10)
    engine.step()
    engine.add(prompt(tail_len, 5000), 10)
    batch = engine.step()
    assert batch.mode is mode and batch.num_reqs == (7 if mode is MIXED else 1)
    engine.run()
    check_answers(engine)


@DEPTHS
def test_flood_of_requests_that_end_at_once_holds_rows_up_for_so_long_only(depth: int) -> None:
    """Such requests give rows and pages back, so the prompt steps would never end of themselves."""
    engine = engine_of(depth=depth, chunk_len=16, max_num_seqs=8, max_model_len=64)
    row = engine.add(prompt(8), 12)
    engine.step()
    limit = most_steps_waited(8, 64, 16)
    assert limit == 32
    waited = longest = num_steps = 0
    while engine.reason(row) is None:
        for index in range(4):
            engine.add(prompt(16, 100 * index + 7 * num_steps), 1)
        batch = engine.step()
        num_steps += 1
        waited = 0 if row in batch.request_ids else waited + 1
        longest = max(longest, waited)
        assert waited <= limit
        assert batch.mode is not DECODE, "the step that the row takes part in goes on with the prompts"
        assert num_steps < 800
    assert longest == limit
    for request_id in engine.served:
        engine.abort(request_id)
    engine.run()
    check_answers(engine)


@DEPTHS
@pytest.mark.parametrize("num_pages", [8, 10, 14])
def test_admission_and_preemption_do_not_chase_each_other(depth: int, num_pages: int) -> None:
    """Three times the pool's worth of requests: what is computed twice stays a fraction of what is computed."""
    engine = engine_of(num_pages=num_pages, depth=depth)
    add_all(engine, [16, 17] * 8, 60)
    num_preempted = 0
    for _ in range(4000):
        if not engine.scheduler.has_unfinished_requests() and not engine.pending:
            break
        before = engine.scheduler.stats().num_preemptions
        was_waiting = bool(engine.batches) and engine.scheduler._filler._num_waited_steps > 0
        engine.step()
        num_preempted = engine.scheduler.stats().num_preemptions
        assert num_preempted == before or not was_waiting, "a row lost its place in a step that it waited for"
    engine.check_pool()
    check_answers(engine)
    assert num_preempted <= 16
    plain = FakeEngine(num_pages=num_pages, depth=depth, has_prefix_cache=False)
    add_all(plain, [16, 17] * 8, 60)
    plain.run()
    assert num_tokens_of(engine) <= 1.1 * num_tokens_of(plain)


def num_tokens_of(engine: FakeEngine) -> int:
    return sum(batch.num_tokens for batch in engine.batches)


@DEPTHS
@pytest.mark.parametrize("is_resolved", [False, True])
def test_rows_may_end_while_they_wait(depth: int, is_resolved: bool) -> None:
    engine = engine_of(depth=depth, chunk_len=16)
    first, second = add_all(engine, [8, 8], 12)
    engine.step()
    long = engine.add(prompt(100, 3000), 5)
    assert engine.launch().request_ids == (long,)
    while is_resolved and engine.pending:
        engine.resolve()
    assert engine.abort(first)
    engine.scheduler.check_invariants()
    engine.run()
    assert engine.reason(second) is engine.reason(long) is FinishReason.LENGTH
    check_answers(engine)


def test_a_broken_prompt_step_ends_rows_that_wait_too() -> None:
    engine = engine_of(chunk_len=16)
    ids = [*add_all(engine, [8, 8], 12)]
    engine.step()
    ids.append(engine.add(prompt(100, 3000), 5))
    engine.launch()
    engine.break_pending()
    assert {engine.reason(request_id) for request_id in ids} == {FinishReason.ERROR}
    engine.check_pool()


@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(0, 2),
    chunk_len=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    num_pages=st.integers(20, 60),
    asked=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(-1, 1)), min_size=1, max_size=12),
)
def test_rows_wait_together_and_steps_are_full(depth, chunk_len, max_num_seqs, num_pages, asked) -> None:
    engine = engine_of(
        depth=depth, chunk_len=chunk_len, max_num_seqs=max_num_seqs, num_pages=num_pages, page_size=4, max_model_len=80
    )
    for index, (length, max_tokens, priority) in enumerate(asked):
        engine.add(prompt(length, 70 * index), max_tokens, priority)
    limit, num_waited = most_steps_waited(min(max_num_seqs, chunk_len), 80, chunk_len), 0
    while engine.scheduler.has_unfinished_requests() or engine.pending:
        batch = engine.step()
        if batch is None:
            continue
        assert batch.num_tokens <= chunk_len
        running = engine.scheduler._running
        started = {*batch.request_ids}
        left_out = [request for request in running.decoding if request.request_id not in started]
        num_waited = num_waited + 1 if left_out else 0
        assert num_waited <= limit
        if left_out:
            assert batch.mode is PREFILL, "all rows go along, or none"
            num_rows = len(left_out)
            assert batch.num_tokens + num_rows > chunk_len, "there was room"
    engine.check_pool()
    check_answers(engine)
