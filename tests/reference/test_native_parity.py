"""Every native architecture against transformers: same weights, tiny, float32, CPU."""

import pytest
import torch
from paged_driver import PagedDriver
from tiny_models import NATIVE, NUM_TOKENS

from graphrunner.attention.cpu_attention import CpuAttention
from graphrunner.attention.torch_attention import TorchAttention
from graphrunner.models.options import ModelOptions
from graphrunner.models.registry import build_model
from graphrunner.weights.checkpoint import iterate_weights
from graphrunner.weights.source import load_model_config, resolve_source

BACKENDS = {"torch": TorchAttention, "cpu": CpuAttention}


@pytest.fixture(scope="module")
def loaded():
    """A function: folder -> our model, kept."""
    models = {}

    def load(folder):
        if folder not in models:
            source = resolve_source(str(folder))
            config = load_model_config(source)
            model = build_model(config, ModelOptions(num_positions=128))
            model.load_weights(iterate_weights(source, config, dtype=torch.float32))
            models[folder] = model
        return models[folder]

    return load


def assert_same(tokens, logits, expected_tokens, expected_logits):
    for name in expected_tokens:
        torch.testing.assert_close(logits[name], expected_logits[name], rtol=1e-3, atol=2e-3)
    assert tokens == expected_tokens


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NATIVE)
def test_flat_batch_then_decode(name, backend, reference, loaded):
    """Prompts of different lengths in one flat batch, then 64 tokens together, with padding rows on one backend."""
    folder, prompts, expected_tokens, expected_logits = reference(name)
    driver = PagedDriver(loaded(folder), BACKENDS[backend]())
    tokens, logits = driver.greedy(prompts, NUM_TOKENS, num_padding_reqs=1 if backend == "cpu" else 0)
    assert_same(tokens, logits, expected_tokens, expected_logits)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NATIVE)
def test_chunked_and_mixed(name, backend, reference, loaded):
    """The long prompt comes in chunks while the short one already decodes; then both decode."""
    folder, prompts, expected_tokens, expected_logits = reference(name)
    driver = PagedDriver(loaded(folder), BACKENDS[backend](), page_size=3)
    for sequence in ("a", "b"):
        driver.new(sequence)
    long, short_tokens = prompts["b"], expected_tokens["a"]
    logits = driver.step({"a": prompts["a"], "b": long[:4]}, num_padding_tokens=3, num_padding_reqs=2)
    torch.testing.assert_close(logits[0], expected_logits["a"][0], rtol=1e-3, atol=2e-3)
    for turn, start in enumerate(range(4, len(long), 5)):
        logits = driver.step({"a": [short_tokens[turn]], "b": long[start : start + 5]}, num_padding_tokens=1)
        torch.testing.assert_close(logits[0], expected_logits["a"][turn + 1], rtol=1e-3, atol=2e-3)
    tokens, logits = driver.decode(["b"], logits[1:], 8)
    assert_same(tokens, logits, {"b": expected_tokens["b"][:8]}, {"b": expected_logits["b"][:8]})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NATIVE)
def test_prefix_in_the_pages(name, backend, reference, loaded):
    """A second sequence starts on pages that the first one wrote."""
    folder, prompts, expected_tokens, expected_logits = reference(name)
    driver = PagedDriver(loaded(folder), BACKENDS[backend](), page_size=4)
    driver.new("donor")
    driver.step({"donor": [*prompts["b"], 5, 6]})
    driver.new("b", shared_with="donor", num_shared_pages=4)
    logits = driver.step({"b": prompts["b"][16:]})
    tokens, logits = driver.decode(["b"], logits, 8)
    assert_same(tokens, logits, {"b": expected_tokens["b"][:8]}, {"b": expected_logits["b"][:8]})
