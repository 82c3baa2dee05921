"""Every weight of a native architecture by its Hugging Face name and shape.

Used to make random weights, to count memory before loading, and to name a missing or misshapen tensor at once.
"""

from __future__ import annotations

import math

from graphrunner.config.model_config import ModelConfig


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes ([out, in] for projections) in the order of the forward. Tied heads are not listed."""
    hidden, q_len, kv_len = (
        config.hidden_size,
        config.num_q_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_len, hidden),
        "self_attn.k_proj.weight": (kv_len, hidden),
        "self_attn.v_proj.weight": (kv_len, hidden),
        "self_attn.o_proj.weight": (hidden, q_len),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (config.intermediate_size, hidden),
        "mlp.up_proj.weight": (config.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, config.intermediate_size),
    }
    if config.attention_bias:
        layer |= {
            "self_attn.q_proj.bias": (q_len,),
            "self_attn.k_proj.bias": (kv_len,),
            "self_attn.v_proj.bias": (kv_len,),
        }
    if config.attention_out_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.mlp_bias:
        layer |= {f"mlp.{part}_proj.bias": (config.intermediate_size,) for part in ("gate", "up")}
        layer["mlp.down_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    if config.architecture.startswith("Gemma"):
        layer |= {"pre_feedforward_layernorm.weight": (hidden,), "post_feedforward_layernorm.weight": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def num_parameters(config: ModelConfig) -> int:
    """How many weights a native architecture has; a tied head counts once."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values())
