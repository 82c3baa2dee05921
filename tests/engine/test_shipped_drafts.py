"""The drafts that come with the package: they fit, they are small, and the embedded model accepts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import graphrunner
from graphrunner import LLM, SamplingParams
from graphrunner.weights.source import EMBEDDED_NAME

DATA = Path(graphrunner.__file__).parent / "speculative" / "data"
OPTIONS = {"max_model_len": 128, "max_num_seqs": 2, "num_threads": 1}
PROMPTS = ("Once upon a time, there was a small owl", "Question: What is a lighthouse?\nAnswer:")


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_size_and_card(method: str) -> None:
    folder = DATA / f"{EMBEDDED_NAME}-{method}"
    assert all(file.stat().st_size <= 16 << 20 for file in folder.iterdir())
    card = (folder / "README.md").read_text()
    assert "Apache-2.0" in card
    accepted = json.loads((folder / "acceptance.json").read_text())
    assert set(accepted) == {"chat", "story", "task"}
    if method == "eagle":
        # Tokens a round, the target's own one counted: what papers call the accepted length.
        assert all(1 + accepted[kind]["num_accepted"] >= 2.3 for kind in ("chat", "story"))


def tokens_of(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in llm.generate(list(PROMPTS), params, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain_tokens() -> list[list[int]]:
    with LLM(**OPTIONS) as llm:
        return tokens_of(llm)


@pytest.mark.embedded
@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_the_embedded_model_accepts_them(method: str, plain_tokens: list[list[int]]) -> None:
    with LLM(**OPTIONS, speculative_config={"method": method, "adaptive": False}) as llm:
        assert tokens_of(llm) == plain_tokens
        num_rounds = sum(step.mode.value == "verify" for step in llm.steps)
    assert num_rounds <= 24, "32 tokens in fewer rounds than that: drafts are accepted"
