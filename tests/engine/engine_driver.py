"""Short words for the engine tests."""

import random

from graphrunner import LLM, SamplingParams

VOCAB_SIZE = 96


def greedy(num_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **more)


def tokens(output: object) -> list[int]:
    return list(output.outputs[0].token_ids)


def prompts_of(lengths: list[int], seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def generate(llm: LLM, prompts: list[list[int]], params: object) -> list[list[int]]:
    return [tokens(o) for o in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)]


def pool_check(llm: LLM) -> None:
    """At idle every page is free or evictable, and none has two owners."""
    scheduler = llm.engine.core.scheduler
    scheduler.check_invariants()
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_pages) == (0, 0, 0)
