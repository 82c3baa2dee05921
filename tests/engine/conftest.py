"""A tiny Llama on disk and engines over it. SOLO is a prompt alone, eager, without a prefix cache."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engine_driver import VOCAB_SIZE, greedy, tokens

from graphrunner import LLM


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB_SIZE, max_position_embeddings=256, tie_word_embeddings=False,
        initializer_range=0.5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def make_llm(tiny_folder: Path) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(**options: object) -> LLM:
        base = {
            "max_model_len": 128,
            "max_num_seqs": 8,
            "num_pages": 200,
            "skip_tokenizer_init": True,
            "num_threads": 1,
        }
        made.append(LLM(str(tiny_folder), **(base | options)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="session")
def solo(tiny_folder: Path) -> Callable[[list[int], int], list[int]]:
    """Greedy tokens of one prompt alone."""
    llm = LLM(
        str(tiny_folder), max_model_len=256, max_num_seqs=1, enforce_eager=True, enable_prefix_caching=False,
        skip_tokenizer_init=True, num_pages=64, num_threads=1,
    )  # fmt: skip

    def run(prompt: list[int], num_tokens: int) -> list[int]:
        return tokens(llm.generate([{"prompt_token_ids": prompt}], greedy(num_tokens), use_tqdm=False)[0])

    return run
