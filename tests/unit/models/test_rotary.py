"""Rotary tables against transformers' own angles, every scaling."""

import pytest
import torch

from graphrunner.config.hf_model_config import model_config_from_hf
from graphrunner.layers.block import rotary_tables

SCALINGS = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-untruncated": {"factor": 8.0, "original_max_position_embeddings": 64, "truncate": False, "beta_fast": 16.0},
    "yarn-factor": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.8},
    "yarn-mscale": {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.2},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_equal_to_transformers(name):
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": name.partition("-")[0], "rope_theta": 5000.0, **SCALINGS[name]}
    hf = LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=256, rope_parameters=rope,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    positions = torch.arange(256)
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), positions.unsqueeze(0))
    table = rotary_tables(model_config_from_hf(hf), 256, torch.device("cpu")).full
    torch.testing.assert_close(table.cos, cos[0, :, :16], rtol=0, atol=2e-6)
    torch.testing.assert_close(table.sin, sin[0, :, :16], rtol=0, atol=2e-6)


def test_dynamic_past_the_context_grows_token_by_token():
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf = LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 2.0},
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    rotary = LlamaRotaryEmbedding(hf)
    table = rotary_tables(model_config_from_hf(hf), 128, torch.device("cpu")).full
    for position in (10, 63, 64, 65, 127):
        cos, _ = rotary(torch.zeros(1), torch.tensor([[position]]))
        torch.testing.assert_close(table.cos[position], cos[0, 0, :16], rtol=0, atol=1e-5)
