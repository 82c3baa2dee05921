"""Every native architecture on the GPU against transformers on the CPU: tiny models, tokens fed, logits compared."""

import pytest
import torch
from paged_driver import PagedDriver
from tiny_models import NATIVE

from graphrunner.attention.registry import create_attention
from graphrunner.models.options import ModelOptions
from graphrunner.models.registry import ModelImpl, load_model
from graphrunner.weights.source import load_model_config, resolve_source

pytestmark = pytest.mark.cuda
NUM_STEPS = 12


def errors_of(made, dtype, impl=ModelImpl.AUTO):
    """Worst absolute difference of the logits, over a flat prefill, mixed steps and padded decode steps."""
    folder, prompts, tokens, expected = made
    source = resolve_source(str(folder))
    device = torch.device("cuda")
    options = ModelOptions(dtype=dtype, device=device, num_positions=128)
    model = load_model(source, load_model_config(source), options, impl=impl)
    driver = PagedDriver(model, create_attention(device), page_size=16)
    for name in prompts:
        driver.new(name)
    worst = 0.0

    def compare(logits, names, step_of):
        nonlocal worst
        for row, name in zip(logits.cpu(), names, strict=True):
            worst = max(worst, (row - expected[name][step_of[name]]).abs().max().item())

    long = prompts["b"]
    driver.step({"a": prompts["a"], "b": long[:5]})
    logits = driver.step({"a": [tokens["a"][0]], "b": long[5:], "c": prompts["c"]}, num_padding_tokens=3)
    names = ["a", "b", "c"]
    step_of = {"a": 1, "b": 0, "c": 0}
    compare(logits, names, step_of)
    for _ in range(NUM_STEPS):
        logits = driver.step({name: [tokens[name][step_of[name]]] for name in names}, num_padding_reqs=1)
        step_of = {name: step + 1 for name, step in step_of.items()}
        compare(logits, names, step_of)
    return worst


@pytest.mark.parametrize("name", NATIVE)
def test_float32(name, reference):
    assert errors_of(reference(name), torch.float32) < 3e-2


@pytest.mark.parametrize("name", NATIVE)
def test_bfloat16(name, reference):
    """Rounding of weights and activations: wrong positions or masks would be off by the logits' own size, about 4."""
    assert errors_of(reference(name), torch.bfloat16) < 1.0


@pytest.mark.parametrize("name", ["gpt-neox", "phi3", "gemma2"])
def test_fallback_float32(name, reference):
    assert errors_of(reference(name), torch.float32, ModelImpl.TRANSFORMERS) < 3e-2
