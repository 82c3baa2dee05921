"""Tiny random models of every architecture: transformers makes and saves them, we read the folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

NUM_TOKENS = 64
VOCAB_SIZE = 97
BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class TinyModel:
    """A transformers model type and what is set apart from `BASE`."""

    model_type: str
    overrides: dict[str, object]


def _rope(kind: str, **numbers: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **numbers}}


NATIVE = {
    "llama": TinyModel("llama", {"tie_word_embeddings": False, "num_key_value_heads": 3}),
    "llama-tied-bias": TinyModel("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": TinyModel("llama", _rope("linear", factor=2.5)),
    "llama-dynamic": TinyModel("llama", _rope("dynamic", factor=2.0) | {"max_position_embeddings": 40}),
    "llama-yarn": TinyModel("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-yarn-mscale": TinyModel(
        "llama",
        _rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.2, truncate=False),
    ),
    "llama-llama3": TinyModel(
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "mistral": TinyModel("mistral", {"sliding_window": 9, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "smollm3": TinyModel("smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "qwen2": TinyModel("qwen2", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen2-window": TinyModel(
        "qwen2", {"head_dim": None, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    ),
    "qwen3": TinyModel("qwen3", {"head_dim": 32, "num_attention_heads": 5, "tie_word_embeddings": True}),
    "gemma2": TinyModel(
        "gemma2",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma3": TinyModel("gemma3_text", {"sliding_window": 8, "num_hidden_layers": 3, "sliding_window_pattern": 3}),
}

OTHERS = {
    "gpt-neox": TinyModel("gpt_neox", {"num_attention_heads": 3}),
    "olmo2": TinyModel("olmo2", {}),
    "phi3": TinyModel("phi3", {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}),
    "mixtral": TinyModel("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": TinyModel("granite", {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5}),
}


def save_tiny_model(tiny: TinyModel, folder: Path):
    """Make the model with weights that matter, save it, return it in eval mode (float32, CPU)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in (BASE | tiny.overrides).items() if value is not None}
    config = AutoConfig.for_model(tiny.model_type, **settings)
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # The default start is so small that attention averages everything and errors in it stay hidden.
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
            elif name.endswith("bias"):
                weight.copy_(torch.randn_like(weight) * 0.3)
            else:
                weight.copy_(torch.randn_like(weight) * (0.5 if "embed" in name else 1.6 * weight.shape[-1] ** -0.5))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def transformers_greedy(model, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """What transformers generates, and its logits [num_tokens, V]."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)
