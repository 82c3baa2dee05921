"""GGUF metadata -> a Hugging Face configuration dict -> ModelConfig, so that both kinds of file take one path.

Some numbers are not in the file because llama.cpp keeps them in code; they are repeated here, each with its reason.
"""

from __future__ import annotations

import math

import torch

from graphrunner.config.hf_model_config import model_config_from_hf
from graphrunner.config.model_config import ModelConfig
from graphrunner.core.errors import ModelLoadError
from graphrunner.weights.gguf_names import ARCHITECTURES
from graphrunner.weights.gguf_quants import GGMLType, dequantize
from graphrunner.weights.gguf_reader import GGUFFile

_GEMMA3_LOCAL_THETA = 10000.0
_GEMMA3_FULL_EVERY = 6
# The 27B models scale scores by hidden_size / heads where their smaller siblings use head_dim; the file does not
# say, but their layer count does.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_LLAMA3_ORIGINAL_LEN = 8192
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0


def model_config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The model that a GGUF file holds.

    Raises:
        ModelLoadError: an architecture without a native model here, or a missing number.
    """
    return model_config_from_hf(hf_config_from_gguf(file))


def hf_config_from_gguf(file: GGUFFile) -> dict[str, object]:
    """The Hugging Face configuration that the model would have had; transformers can build from it."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelLoadError(f"{file.path}: unknown GGUF architecture {name!r} (known: {known})")
    meta = _Metadata(file, str(name))
    num_layers = meta.integer("block_count")
    hidden_size = meta.integer("embedding_length")
    num_heads = meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", meta.integer("rope.dimension_count", hidden_size // num_heads))
    if head_dim != meta.integer("attention.value_length", head_dim):
        raise ModelLoadError(f"{file.path}: attention.value_length differs from attention.key_length={head_dim}")
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[meta.architecture]],
        "model_type": {"gemma3": "gemma3_text"}.get(meta.architecture, meta.architecture),
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon", 1e-6),
        "max_position_embeddings": meta.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_parameters": _rope(meta, head_dim),
        "hidden_act": "silu",
        "sliding_window": None,
        "dtype": _dtype(file),
    }
    token_id = {key: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "padding")}
    ends = [token_id[key] for key in ("eos", "eot") if token_id[key] is not None]
    config |= {"bos_token_id": token_id["bos"], "eos_token_id": ends, "pad_token_id": token_id["padding"]}
    if meta.architecture in _LAYERS_OF_27B:
        config |= _gemma(meta, num_layers, hidden_size, num_heads, head_dim)
    if meta.architecture == "smollm3":
        config["no_rope_layer_interval"] = 4  # fixed in llama.cpp
    return config


class _Metadata:
    """Typed reads of `<architecture>.<key>`."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, key: str) -> object:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"{self.file.path}: {self.architecture}.{key}={value!r} must be one number")
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing")
    return embedding.shape[0]


def _dtype(file: GGUFFile) -> str:
    """What a card computes in: float32 where most of the weights are, else bfloat16, as the models were trained.

    Packed numbers are coarser than bfloat16 rounds, and float16 would overflow in some models (Gemma).
    """
    num_float32 = sum(math.prod(tensor.shape) for tensor in file.tensors.values() if tensor.kind is GGMLType.F32)
    num_all = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    return "float32" if 2 * num_float32 > num_all else "bfloat16"


def _rope(meta: _Metadata, head_dim: int) -> dict[str, object]:
    theta = meta.number("rope.freq_base", 10000.0)
    name = str(meta.get("rope.scaling.type") or "none")
    full: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
    if name not in ("none", "linear", "yarn"):
        raise ModelLoadError(f"{meta.file.path}: {meta.architecture}.rope.scaling.type={name!r} is not supported")
    if name != "none":
        full |= {"rope_type": name, "factor": meta.number("rope.scaling.factor", 1.0)}
        original = meta.get("rope.scaling.original_context_length")
        if original is not None:
            full["original_max_position_embeddings"] = original
    if "rope_freqs.weight" in meta.file.tensors:
        full |= _llama3_scaling(meta.file, theta, head_dim)
    if meta.architecture != "gemma3":
        return full
    local = {"rope_type": "default", "rope_theta": _GEMMA3_LOCAL_THETA}
    return {"full_attention": full, "sliding_attention": local}


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, object]:
    """Llama 3.1 scaling, which the file keeps only as a table of divisors of the frequencies.

    The largest divisor is the factor; the other three numbers are the same in every released model, and the table
    computed from them must be the file's.
    """
    tensor = file.tensors["rope_freqs.weight"]
    divisors = torch.empty(tensor.shape)
    dequantize(file.raw(tensor), tensor.kind, divisors)
    factor = round(float(divisors.max()), 4)
    wavelength = 2 * torch.pi * theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    smooth = ((_LLAMA3_ORIGINAL_LEN / wavelength) - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    expected = 1.0 / ((1 - smooth.clamp(0, 1)) / factor + smooth.clamp(0, 1))
    if expected.shape != divisors.shape or not torch.allclose(expected, divisors, rtol=1e-2):
        raise ModelLoadError(f"{file.path}: rope_freqs.weight is not a Llama 3 table; other tables are not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_LEN,
    }


def _gemma(meta: _Metadata, num_layers: int, hidden_size: int, num_heads: int, head_dim: int) -> dict[str, object]:
    is_27b = num_layers == _LAYERS_OF_27B[meta.architecture]
    is_gemma3 = meta.architecture == "gemma3"
    period = _GEMMA3_FULL_EVERY if is_gemma3 else 2
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden_size // num_heads if is_27b else head_dim,
        "sliding_window": meta.integer("attention.sliding_window"),
        "layer_types": kinds,
        "attn_logit_softcapping": None if is_gemma3 else meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": None if is_gemma3 else meta.number("final_logit_softcapping", 30.0),
    }
