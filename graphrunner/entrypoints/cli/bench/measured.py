"""Timing of one engine, shared by the bench commands."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphrunner.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from graphrunner.entrypoints.llm import LLM

_FIRST_ID, _LAST_ID = 10, 1000


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Of one fixed batch: until every request had its first token, and a step after that."""

    first_token_ms: float
    step_ms: float
    tokens_per_s: float


def random_prompt(rng: random.Random, length: int, vocab_size: int) -> dict[str, list[int]]:
    """Token ids that the vocabulary has, the first few left out: they are often special."""
    last = min(_LAST_ID, vocab_size - 1)
    return {"prompt_token_ids": [rng.randint(min(_FIRST_ID, last), last) for _ in range(length)]}


def batch_times(llm: LLM, batch_size: int, prompt_len: int, num_tokens: int, num_repeats: int = 3) -> BatchTimes:
    """Time a batch of equal requests; the best of `num_repeats`, because noise only ever adds."""
    _seconds(llm, batch_size, prompt_len, min(8, num_tokens), seed=0)  # warms up
    firsts, steps = [], []
    for repeat in range(1, num_repeats + 1):
        first_s = _seconds(llm, batch_size, prompt_len, 1, seed=2 * repeat)
        whole_s = _seconds(llm, batch_size, prompt_len, num_tokens, seed=2 * repeat + 1)
        firsts.append(first_s)
        steps.append((whole_s - first_s) / max(1, num_tokens - 1))
    step_s = max(min(steps), 1e-9)
    return BatchTimes(min(firsts) * 1e3, step_s * 1e3, batch_size / step_s)


def _seconds(llm: LLM, batch_size: int, prompt_len: int, num_tokens: int, *, seed: int) -> float:
    """Wall time of one batch. Prompts differ between calls, so that the prefix cache does not help."""
    rng = random.Random(seed)
    prompts = [random_prompt(rng, prompt_len, llm.engine.vocab_size) for _ in range(batch_size)]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    start_s = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start_s
