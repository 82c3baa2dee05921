"""The embedded SmolLM2-135M-Instruct: greedy tokens that transformers gave for the same bf16-rounded weights."""

import pytest
import torch
from paged_driver import PagedDriver

from graphrunner.attention.cpu_attention import CpuAttention
from graphrunner.config.quantization import Quantization
from graphrunner.models.options import ModelOptions
from graphrunner.models.registry import load_model
from graphrunner.weights.source import load_model_config, resolve_source

pytestmark = [pytest.mark.embedded, pytest.mark.xdist_group("embedded")]

# "The capital of France is", and the answer " Paris.\n\nThe answer is: ..."
PROMPT = [504, 3575, 282, 4649, 314]
GREEDY = [7042, 30, 198, 198, 504, 2988, 314, 42]
TOP_LOGITS = {7042: 17.345, 260: 14.860, 4528: 13.200}


def load(**options):
    source = resolve_source(None)
    config = load_model_config(source)
    return load_model(source, config, ModelOptions(num_positions=256, **options))


@pytest.fixture(scope="module")
def model():
    return load()


def run(model, prompt, num_tokens):
    driver = PagedDriver(model, CpuAttention(), num_pages=40, page_size=16, max_len=256)
    return driver.greedy({"a": prompt}, num_tokens)


def test_golden_tokens_and_logits(model):
    tokens, logits = run(model, PROMPT, len(GREEDY))
    assert tokens["a"] == GREEDY
    for token, value in TOP_LOGITS.items():
        assert logits["a"][0, token].item() == pytest.approx(value, abs=2e-3)


def test_bfloat16_storage_changes_nothing(model):
    """The embedded weights are bf16 numbers: kept as such they give the same logits from half the bytes."""
    _, expected = run(model, PROMPT, 4)
    tokens, logits = run(load(weight_dtype=torch.bfloat16), PROMPT, 4)
    assert tokens["a"] == GREEDY[:4]
    torch.testing.assert_close(logits["a"], expected["a"], rtol=1e-4, atol=1e-3)


def test_int8_stays_close(model):
    _, expected = run(model, PROMPT, 1)
    tokens, logits = run(load(quantization=Quantization.INT8), PROMPT, 8)
    assert tokens["a"][0] == GREEDY[0]
    assert (logits["a"][0] - expected["a"][0]).abs().mean() < 0.25
