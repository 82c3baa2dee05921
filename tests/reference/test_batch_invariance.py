"""Deterministic mode, bit for bit: a sequence's logits do not depend on its company, its chunks or its padding."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_driver import PagedDriver
from tiny_models import NATIVE, VOCAB_SIZE, save_tiny_model

from graphrunner.attention.registry import create_attention
from graphrunner.kernels.batch_invariance import batch_invariant
from graphrunner.models.options import ModelOptions
from graphrunner.models.registry import build_model
from graphrunner.weights.checkpoint import iterate_weights
from graphrunner.weights.source import load_model_config, resolve_source

CPU = torch.device("cpu")
LENGTH = 24
LAYOUTS = st.lists(st.lists(st.integers(1, LENGTH), max_size=5), min_size=1, max_size=8)
"""For each companion, the lengths of its chunks."""


@pytest.fixture(scope="module", params=["llama", "llama-tied-bias", "mistral", "qwen3", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(NATIVE[request.param], folder)
    source = resolve_source(str(folder))
    config = load_model_config(source)
    model = build_model(config, ModelOptions(num_positions=512))
    model.load_weights(iterate_weights(source, config, dtype=torch.float32))
    return model


def driver_of(model, **options: int) -> PagedDriver:
    return PagedDriver(model, create_attention(CPU, is_batch_invariant=True), max_rows=12, **options)


def tokens_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def alone(model, tokens: list[int], **options: int) -> torch.Tensor:
    """Logits of every token, computed in one chunk by itself."""
    driver = driver_of(model, **options)
    driver.new("target")
    with batch_invariant(True):
        return driver.step({"target": tokens}, all_rows=True)


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(1, LENGTH), max_size=6), company=LAYOUTS, seed=st.integers(0, 99), is_last=st.booleans()
)
def test_logits_do_not_depend_on_the_batch(model, cuts: list[int], company, seed: int, is_last: bool) -> None:
    tokens = tokens_of(seed, LENGTH)
    expected = alone(model, tokens)
    driver = driver_of(model)
    others = [(f"other {index}", list(lengths)) for index, lengths in enumerate(company)]
    for name, _ in others:
        driver.new(name)
    driver.new("target")
    done = 0
    pieces = [*cuts, *[1] * LENGTH]
    while done < LENGTH:
        piece = tokens[done : done + pieces.pop(0)]
        chunks = {name: tokens_of(seed + 7, lengths.pop(0)) for name, lengths in others if lengths}
        chunks = chunks | {"target": piece} if is_last else {"target": piece} | chunks
        with batch_invariant(True):
            logits = driver.step(chunks, num_padding_tokens=done % 3, num_padding_reqs=1, all_rows=True)
        before = sum(len(chunk) for name, chunk in chunks.items() if name != "target") if is_last else 0
        found = logits[before : before + len(piece)]
        assert torch.equal(found, expected[done : done + len(piece)]), f"tokens {done} to {done + len(piece)}"
        done += len(piece)


def test_long_sequences_are_summed_the_same_in_chunks_and_token_by_token(model) -> None:
    """Past 256 keys a decode row's keys are summed in spans; a prompt's rows must be, too."""
    tokens = tokens_of(1, 70) * 4 + tokens_of(2, 20)
    options = {"num_pages": 200, "max_len": 400}
    expected = alone(model, tokens, **options)
    driver = driver_of(model, **options)
    driver.new("target")
    with batch_invariant(True):
        assert torch.equal(driver.step({"target": tokens[:299]}, all_rows=True), expected[:299])
        assert torch.equal(driver.step({"target": tokens[299:]}, all_rows=True), expected[299:])
    driver = driver_of(model, **options)
    driver.new("target")
    with batch_invariant(True):
        driver.step({"target": tokens[:250]})
        for place in range(250, len(tokens)):
            assert torch.equal(driver.step({"target": tokens[place : place + 1]})[0], expected[place]), place


def test_without_the_mode_company_does_change_bits(model) -> None:
    """What the mode is for; and that the comparisons above could fail."""
    tokens = tokens_of(3, LENGTH)
    results = []
    for chunks in ([tokens], [[token] for token in tokens]):
        driver = PagedDriver(model, create_attention(CPU))
        driver.new("target")
        results.append([driver.step({"target": chunk}) for chunk in chunks][-1])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
    assert not torch.equal(*results)
