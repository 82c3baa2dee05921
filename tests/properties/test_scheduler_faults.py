"""Kinds of fault seen in other engines, replayed against a model that reads every page."""

import random

import pytest
from paged_fake import FakeEngine, solo

from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.request import FinishReason

CANARY = (5, 6, 7, 8, 9)
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def serve(engine: FakeEngine, prompts, max_tokens: int) -> list[str]:
    """Run all prompts together; every answer must be the one it gets alone."""
    ids = [engine.add(prompt, max_tokens) for prompt in prompts]
    engine.run()
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert engine.tokens(request_id) == solo(prompt, max_tokens), request_id
        assert engine.reason(request_id) is FinishReason.LENGTH
    return ids


def check_canary(engine: FakeEngine) -> None:
    serve(engine, [CANARY], 8)


@DEPTHS
@pytest.mark.parametrize(("prompt_len", "num_cached"), [(31, 16), (32, 16), (33, 32)])
def test_repeated_prompt_computes_at_least_one_token(depth, prompt_len, num_cached) -> None:
    engine = FakeEngine(depth=depth)
    prompt = tuple(range(prompt_len))
    (first,) = serve(engine, [prompt], 8)
    (second,) = serve(engine, [prompt], 8)
    assert engine.served[first].request.num_cached_tokens == 0
    assert engine.served[second].request.num_cached_tokens == num_cached
    assert engine.scheduler.stats().num_prefix_hit_tokens == num_cached


@DEPTHS
@pytest.mark.parametrize("has_prefix_cache", [False, True])
@pytest.mark.parametrize("num_pages", [8, 9])
def test_preemption_at_a_page_border(depth, has_prefix_cache, num_pages) -> None:
    engine = FakeEngine(num_pages=num_pages, depth=depth, has_prefix_cache=has_prefix_cache)
    prompts = [(i, *range(100, 116)) for i in range(4)] + [(i, *range(200, 215)) for i in range(4)]
    serve(engine, prompts, 60)
    assert engine.scheduler.stats().num_preemptions >= 1


@DEPTHS
@pytest.mark.parametrize("chunk_len", [7, 16, 64])
def test_shared_prefix_around_the_page_size(depth, chunk_len) -> None:
    engine = FakeEngine(depth=depth, chunk_len=chunk_len, num_pages=65)
    prompts = []
    for prefix_len in (15, 16, 17, 32):
        prefix = tuple(range(300, 300 + prefix_len))
        prompts += [(*prefix, tail, tail + 1) for tail in (1, 3)]
        prompts.append(tuple(range(prefix_len, prefix_len + 20)))
    serve(engine, prompts, 8)
    serve(engine, prompts[::-1], 8)
    assert engine.scheduler.stats().num_prefix_hit_tokens > 0


@DEPTHS
@pytest.mark.parametrize("is_resolved", [False, True])
def test_unfinished_prefix_is_not_published(depth, is_resolved) -> None:
    engine = FakeEngine(depth=depth, chunk_len=8, num_pages=9)
    prompt = tuple(range(40))
    request_id = engine.add(prompt)
    engine.launch()
    if is_resolved:
        engine.resolve()
    engine.launch()
    if is_resolved:
        engine.resolve()
    assert engine.abort(request_id)
    # Two chunks of 8 make one page; without their results nothing may be kept.
    assert engine.cache.num_cached_pages == (1 if is_resolved else 0)
    engine.run()
    serve(engine, [tuple(range(500 + 40 * i, 540 + 40 * i)) for i in range(4)], 20)
    serve(engine, [prompt], 8)


def test_broken_step_publishes_nothing() -> None:
    """Pages of a step that raised hold garbage."""
    engine = FakeEngine()
    prompt = tuple(range(40))
    request_id = engine.add(prompt)
    engine.scheduler.schedule()  # and the model raises: nothing is written
    assert engine.scheduler.finish_running(FinishReason.ERROR) == [request_id]
    assert engine.cache.num_cached_pages == 0
    engine.check_pool()
    serve(engine, [prompt], 8)


def at_queued(engine, prompt):
    return engine.add(prompt)


def at_second_chunk(engine, prompt):
    request_id = engine.add(prompt)
    engine.step()
    engine.launch()
    return request_id


def after_steps(num_steps):
    def drive(engine, prompt):
        request_id = engine.add(prompt)
        for _ in range(num_steps):
            engine.step()
        return request_id

    return drive


@DEPTHS
@pytest.mark.parametrize(
    "drive",
    [at_queued, at_second_chunk, after_steps(3), after_steps(4), after_steps(9)],
    ids=["queued", "second chunk", "first decode", "second decode", "last decode"],
)
def test_abort_in_every_state(depth, drive) -> None:
    engine = FakeEngine(depth=depth, chunk_len=16)
    check_canary(engine)
    request_id = drive(engine, tuple(range(40)))
    neighbour = engine.add((1, 2, 3), 20)
    assert engine.reason(request_id) is None
    assert engine.abort(request_id)
    assert not engine.abort(request_id)
    engine.scheduler.check_invariants()
    engine.run()
    assert engine.reason(request_id) is FinishReason.ABORT
    assert engine.tokens(neighbour) == solo((1, 2, 3), 20)
    assert not engine.abort(request_id) and not engine.abort("unknown")
    check_canary(engine)


@DEPTHS
def test_a_thousand_random_aborts(depth) -> None:
    rng = random.Random(depth)
    engine = FakeEngine(depth=depth, chunk_len=8, num_pages=12, max_num_seqs=4)
    check_canary(engine)
    for _ in range(1000):
        request_id = engine.add(tuple(rng.choices((1, 2), k=rng.randint(1, 60))), rng.randint(1, 6))
        for _ in range(rng.randint(0, 4)):
            engine.step()
        was_live = engine.reason(request_id) is None
        assert engine.abort(request_id) == was_live
    engine.run()
    check_canary(engine)


@DEPTHS
@pytest.mark.parametrize(("num_pages", "num_tokens"), [(4, 8), (5, 24)])
def test_last_running_request_is_capped_to_the_pool(depth, num_pages, num_tokens) -> None:
    engine = FakeEngine(num_pages=num_pages, depth=depth)
    prompt = tuple(range(40))
    request_id = engine.add(prompt, 200)
    engine.run(max_steps=60)
    assert engine.tokens(request_id) == solo(prompt, num_tokens)
    assert engine.reason(request_id) is FinishReason.LENGTH
    check_canary(engine)


@DEPTHS
def test_unservable_prompt_is_refused_and_the_queue_moves(depth) -> None:
    engine = FakeEngine(num_pages=5, depth=depth)
    with pytest.raises(InvalidRequestError, match=r"80 tokens.*64 tokens"):
        engine.add(tuple(range(80)))
    serve(engine, [(1, 2, 3), (4, 5), (6,)], 8)


@DEPTHS
@pytest.mark.parametrize(("prompt_len", "max_tokens", "num_tokens"), [(63, 1, 1), (62, 2, 2), (62, 50, 2), (63, 5, 1)])
def test_context_limit(depth, prompt_len, max_tokens, num_tokens) -> None:
    engine = FakeEngine(max_model_len=64, depth=depth)
    prompt = tuple(range(prompt_len))
    request_id = engine.add(prompt, max_tokens)
    engine.run()
    assert engine.tokens(request_id) == solo(prompt, num_tokens)
    assert engine.reason(request_id) is FinishReason.LENGTH
    assert max(batch.max_seq_len for batch in engine.batches) <= 63
    for length in (64, 65, 10_000):
        with pytest.raises(InvalidRequestError, match=rf"{length} tokens.*64 tokens"):
            engine.add(tuple(range(length)))
    check_canary(engine)


@DEPTHS
def test_pages_taken_by_someone_else(depth) -> None:
    """What was admitted ends with what it has, instead of waiting for ever."""
    engine = FakeEngine(num_pages=5, depth=depth)
    prompt = tuple(range(20))
    running = engine.add(prompt, 30)
    engine.step()
    taken = engine.allocator.allocate(engine.allocator.num_free)
    waiting = engine.add(tuple(range(50)), 4)
    for _ in range(40):
        engine.step()
    assert engine.reason(running) is FinishReason.LENGTH
    assert engine.tokens(running) == solo(prompt, 13), "two pages hold 32 tokens, and one more is sampled"
    assert engine.reason(waiting) is FinishReason.LENGTH and engine.tokens(waiting) == []
    engine.allocator.free(taken)
    check_canary(engine)
