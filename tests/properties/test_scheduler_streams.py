"""Dense random streams: small pools, many requests, so that nearly every stream preempts, evicts and hits prefixes."""

import random

import pytest
from paged_fake import FakeEngine
from test_scheduler_machine import check_answer

from graphrunner.core.errors import InvalidRequestError


def random_engine(rng: random.Random, *, prompts_first: bool) -> FakeEngine:
    page_size = rng.choice((1, 3, 16))
    return FakeEngine(
        num_pages=2 + rng.randint(16, 100) // page_size,
        page_size=page_size,
        max_num_seqs=rng.randint(1, 6),
        chunk_len=rng.choice((1, 5, 8, 17, 64)),
        max_model_len=rng.randint(16, 64),
        depth=rng.randint(0, 2),
        has_prefix_cache=rng.random() < 0.8,
        prompts_first=prompts_first,
    )


def random_prompt(rng: random.Random) -> tuple[int, ...]:
    shared = (1,) * rng.choice((0, 2, 3, 15, 16, 17, 32))
    return shared + tuple(rng.choices((1, 2, 3), k=rng.randint(1, 16)))


def run_stream(seed: int) -> FakeEngine:
    rng = random.Random(seed)
    engine = random_engine(rng, prompts_first=bool(seed % 2))
    for _ in range(60):
        action = rng.random()
        if action < 0.3:
            try:
                is_stopping, priority = rng.random() < 0.3, rng.choice((0, 0, 0, 1))
                engine.add(random_prompt(rng), rng.randint(1, 40), priority, ignore_eos=not is_stopping)
            except InvalidRequestError:
                pass
        elif action < 0.36 and engine.served:
            engine.abort(rng.choice(sorted(engine.served)))
        elif action < 0.38:
            engine.break_pending()
        else:
            engine.step()
        engine.scheduler.check_invariants()
    engine.run()
    return engine


@pytest.mark.parametrize("seed", range(150))
def test_stream(seed: int) -> None:
    for served in run_stream(seed).served.values():
        check_answer(served)


@pytest.mark.parametrize("prompts_first", [False, True])
def test_streams_reach_the_hard_paths(*, prompts_first: bool) -> None:
    """Else the test above proves little."""
    stats = [run_stream(seed).scheduler.stats() for seed in range(prompts_first, 60, 2)]
    assert sum(s.num_preemptions > 0 for s in stats) >= 8
    assert sum(s.num_prefix_hit_tokens > 0 for s in stats) >= 8
