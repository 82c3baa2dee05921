"""Packed weights on the GPU against the same numbers widened on the CPU: logits of prefill, mixed and decode steps."""

import random

import pytest
import torch
from paged_driver import PagedDriver

from graphrunner.attention.registry import create_attention
from graphrunner.config.model_config import ModelConfig
from graphrunner.config.quantization import Quantization
from graphrunner.models.options import ModelOptions
from graphrunner.models.registry import build_model
from graphrunner.weights.dummy import iterate_dummy

pytestmark = pytest.mark.cuda
PACKINGS = [one for one in Quantization if one is not Quantization.NONE]
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", model_type="llama", vocab_size=211, hidden_size=256, intermediate_size=640,
    num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=64, max_position=512,
)  # fmt: skip


def model_on(device: torch.device, dtype: torch.dtype, packing: Quantization):
    """Rounded to bfloat16 first, so that both places pack the same numbers."""
    model = build_model(CONFIG, ModelOptions(dtype=dtype, device=device, quantization=packing))
    weights = iterate_dummy(CONFIG, torch.float32, torch.device("cpu"))
    model.load_weights((name, weight.bfloat16().to(device)) for name, weight in weights)
    return model


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["wide cache", "fp8 cache"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-2), (torch.bfloat16, 0.5)], ids=str)
@pytest.mark.parametrize("packing", PACKINGS)
def test_logits_are_those_of_the_widened_weights(packing, dtype, tolerance, cache_dtype):
    """One row, a few, a tile of tokens and 300 of them: every kernel meets every packing."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    drivers = [
        PagedDriver(
            model_on(device, its_dtype, packing), create_attention(device), page_size=16, max_len=512,
            cache_dtype=cache_dtype,
        )
        for device, its_dtype in ((gpu, dtype), (cpu, torch.float32))
    ]  # fmt: skip
    rng = random.Random(5)
    long = [rng.randrange(CONFIG.vocab_size) for _ in range(300)]
    steps = [{"a": long[:5]}, {"a": [7], "b": long[:40]}, {"a": [8]}, {"a": [9], "b": [3]}, {"c": long}, {"c": [1]}]
    for driver in drivers:
        for name in "abc":
            driver.new(name)
    # Rounding three hundred rows of activations to fp8 is part of the fast path; an fp8 cache may round either way.
    is_coarse = packing is Quantization.FP8 or cache_dtype is not None
    for step in steps:
        got, want = (driver.step(step) for driver in drivers)
        gap = (got.float().cpu() - want.float()).abs().max().item()
        assert gap < (max(tolerance, 0.6) if is_coarse else tolerance), (step.keys(), gap)
