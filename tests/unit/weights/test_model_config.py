"""Hugging Face configurations become ModelConfig with the same meaning, and bad ones name the field."""

from __future__ import annotations

import subprocess
import sys

import pytest

from graphrunner.config.hf_model_config import model_config_from_hf
from graphrunner.config.model_config import LayerType, ModelConfig, RopeScaling
from graphrunner.core.errors import ModelLoadError

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config(**changes: object) -> ModelConfig:
    return model_config_from_hf({**BASE, **changes})


def test_llama_defaults() -> None:
    cfg = config(eos_token_id=[2, 5], bos_token_id=1, torch_dtype="bfloat16")
    assert (cfg.head_dim, cfg.num_kv_heads, cfg.eos_token_ids, cfg.bos_token_id) == (8, 2, (2, 5), 1)
    assert cfg.dtype == "bfloat16"
    assert cfg.layer_types == (LayerType.FULL,) * 4
    assert cfg.attention_scale == pytest.approx(8**-0.5)
    assert cfg.is_native
    assert not cfg.tie_embeddings


@pytest.mark.parametrize("is_new_layout", [True, False])
def test_llama3_rope_in_both_layouts(is_new_layout: bool) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    if is_new_layout:
        cfg = config(rope_parameters={**scaling, "rope_theta": 5e5})
    else:
        cfg = config(rope_scaling=scaling, rope_theta=5e5)
    assert (cfg.rope.theta, cfg.rope.scaling, cfg.rope.factor) == (5e5, RopeScaling.LLAMA3, 8.0)
    assert cfg.rope.original_max_position == 64


def test_gemma3_reads_both_bases_and_layer_pattern() -> None:
    cfg = config(
        architectures=["Gemma3ForCausalLM"],
        num_hidden_layers=7,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=16,
        query_pre_attn_scalar=8,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert [i for i, t in enumerate(cfg.layer_types) if t is LayerType.FULL] == [5]
    assert (cfg.rope.theta, cfg.rope.local_theta, cfg.rope.scaling) == (1e6, 1e4, RopeScaling.LINEAR)
    assert cfg.qk_norm and cfg.tie_embeddings and cfg.sliding_window == 16
    assert cfg.embedding_scale == pytest.approx(32**0.5)


def test_window_is_off_unless_used() -> None:
    cfg = config(architectures=["Qwen2ForCausalLM"], sliding_window=8, use_sliding_window=False)
    assert cfg.sliding_window is None
    assert cfg.attention_bias and not cfg.attention_out_bias
    assert config(architectures=["MistralForCausalLM"], sliding_window=8).layer_types == (LayerType.SLIDING,) * 4


def test_smollm3_layers_without_rope() -> None:
    assert config(architectures=["SmolLM3ForCausalLM"]).no_rope_layers == {3}
    flags = config(architectures=["SmolLM3ForCausalLM"], no_rope_layers=[1, 0, 1, 0])
    assert flags.no_rope_layers == {1, 3}


def test_a_gemma3_with_vision_gives_its_text_half() -> None:
    text = {k: v for k, v in BASE.items() if k != "architectures"} | {"model_type": "gemma3_text"}
    cfg = model_config_from_hf(
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    )
    assert cfg.architecture == "Gemma3ForCausalLM"
    assert cfg.eos_token_ids == (1, 106)


def test_other_architectures_keep_the_raw_config_for_the_fallback() -> None:
    cfg = model_config_from_hf(
        {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": 10,
            "n_embd": 8,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 32,
            "activation_function": "gelu_new",
        }
    )
    assert not cfg.is_native
    assert (cfg.num_layers, cfg.num_kv_heads, cfg.head_dim, cfg.max_position) == (2, 2, 4, 32)
    assert cfg.hf_config["n_embd"] == 8


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size='big'"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5"),
        ({"hidden_act": "relu6"}, "hidden_act='relu6'"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type='spiral'"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"vocab_size": -4}, "vocab_size=-4"),
        ({"architectures": None, "model_type": "mystery"}, "model_type='mystery'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
def test_errors_name_field_and_value(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        config(**changes)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_stays_without_torch() -> None:
    code = "import sys, graphrunner.config.hf_model_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
