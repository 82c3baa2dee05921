"""Writes a Hugging Face state dict as llama.cpp's converter would: the other direction of weights.gguf_names."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

INTERLEAVED = {"llama", "smollm3"}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hf_name: str, architecture: str) -> str:
    base, _, suffix = hf_name.rpartition(".")
    if base == "model.embed_tokens":
        return f"token_embd.{suffix}"
    if base == "model.norm":
        return f"output_norm.{suffix}"
    if base == "lm_head":
        return f"output.{suffix}"
    layer, _, part = base.removeprefix("model.layers.").partition(".")
    if architecture.startswith("gemma"):
        norms = {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    else:
        norms = {"post_attention_layernorm": "ffn_norm"}
    return f"blk.{layer}.{(NAMES | norms)[part]}.{suffix}"


def stored(name: str, weight: Tensor, architecture: str, num_heads: int, num_kv_heads: int) -> np.ndarray:
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        weight = weight + 1.0
    heads = num_heads if ".q_proj." in name else num_kv_heads if ".k_proj." in name else 0
    if heads and architecture in INTERLEAVED:
        half = weight.shape[0] // heads // 2
        weight = weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    return weight.contiguous().numpy()


def write_gguf(
    path: Path,
    architecture: str,
    config: object,
    state: dict[str, Tensor],
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> None:
    """config: a transformers text config; state: its model's state dict, fp32; extra_tensors: under GGUF names."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    for name, weight in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = stored(name, weight, architecture, config.num_attention_heads, config.num_key_value_heads)
        writer.add_tensor(gguf_name(name, architecture), array)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_model(architecture: str) -> tuple[object, dict[str, Tensor]]:
    """A random transformers config and state dict for a GGUF architecture name."""
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config_class, model_class, extra = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
        "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM, {}),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM, {"query_pre_attn_scalar": 8}),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, {"query_pre_attn_scalar": 8}),
    }[architecture]
    torch.manual_seed(0)
    config = config_class(**sizes, **extra)
    if architecture == "smollm3":
        config.head_dim = 8
    state = {name: torch.randn_like(value) for name, value in model_class(config).state_dict().items()}
    return config, state
