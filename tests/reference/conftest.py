import random
from functools import cache

import pytest
import torch
from tiny_models import NATIVE, NUM_TOKENS, OTHERS, VOCAB_SIZE, save_tiny_model, transformers_greedy


@pytest.fixture(scope="session", autouse=True)
def two_threads():
    """Tiny matrices run slower on more threads, and other test processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_prompts() -> dict[str, list[int]]:
    rng = random.Random(3)
    return {name: [rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for name, length in
            (("a", 5), ("b", 17), ("c", 1))}  # fmt: skip


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """A function: tiny model -> (its folder, prompts, transformers' tokens and logits by prompt); kept once made."""

    @cache
    def make(name):
        tiny = (NATIVE | OTHERS)[name]
        folder = tmp_path_factory.mktemp(name)
        model = save_tiny_model(tiny, folder)
        prompts = make_prompts()
        tokens, logits = {}, {}
        for key, prompt in prompts.items():
            tokens[key], logits[key] = transformers_greedy(model, prompt, NUM_TOKENS)
        return folder, prompts, tokens, logits

    return make
