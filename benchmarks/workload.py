"""What is run: the lengths and counts of each measurement, at full size and at a size for a laptop."""

import random
from dataclasses import dataclass

from marks import LARGER_PROMPT_LENS, SMALL_PROMPT_LENS


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of the measurements.

    Attributes:
        prompt_len, num_steps: a decode step is (time of num_steps + 1 tokens - time of 1) / num_steps.
        short_prompt_len: of the 1B shape at batch 1.
        batches: of decode steps, and of the fixed-length rate.
        fixed_lens: prompt and output length of the fixed-length rate.
        offline_requests, offline_lens: how many requests, and the range of both lengths.
        small_prompts, larger_prompts: prompts whose graphs are compared with eager.
        bytes_per_value: of weights and KV.
    """

    prompt_len: int = 960
    num_steps: int = 128
    short_prompt_len: int = 32
    batches: tuple[int, ...] = (1, 16, 64, 256)
    fixed_lens: tuple[int, int] = (128, 256)
    offline_requests: int = 256
    offline_lens: tuple[int, int] = (100, 1024)
    small_prompts: tuple[int, ...] = SMALL_PROMPT_LENS
    larger_prompts: tuple[int, ...] = LARGER_PROMPT_LENS
    bytes_per_value: int = 2

    def offline(self, seed: int = 1) -> tuple[list[int], list[int]]:
        """Lengths of prompts and outputs: all prompts are drawn first."""
        rng, (low, high) = random.Random(seed), self.offline_lens
        prompt_lens = [rng.randint(low, high) for _ in range(self.offline_requests)]
        return prompt_lens, [rng.randint(low, high) for _ in range(self.offline_requests)]


FULL = Workload()
TINY = Workload(
    prompt_len=24,
    num_steps=6,
    short_prompt_len=8,
    batches=(1, 4),
    fixed_lens=(8, 6),
    offline_requests=6,
    offline_lens=(4, 12),
    small_prompts=(8, 16),
    larger_prompts=(40,),
    bytes_per_value=4,
)


def prompt(length: int, index: int, vocab_size: int) -> dict[str, list[int]]:
    """Token ids without a pattern that a cache could profit from."""
    start = min(5, vocab_size - 1)
    return {
        "prompt_token_ids": [start + (7 * index + 13 * p) % (min(30_000, vocab_size) - start) for p in range(length)]
    }
