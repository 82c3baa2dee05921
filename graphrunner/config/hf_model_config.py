"""Hugging Face configuration dicts -> ModelConfig. Both layouts: rope_parameters (5.x) and rope_scaling (older)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from graphrunner.config.model_config import (
    DTYPE_NAMES,
    NATIVE_ARCHITECTURES,
    Activation,
    LayerType,
    ModelConfig,
    RopeConfig,
    RopeScaling,
)
from graphrunner.core.errors import ModelLoadError

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    # Early Gemma configurations say "gelu" and mean the tanh form; only Gemma reaches this table with it.
    "gelu": Activation.GELU_TANH,
}
_ARCHITECTURE_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_TEXT_HALF_OF = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}


def model_config_from_hf(hf_config: object) -> ModelConfig:
    """Read a Hugging Face configuration: its dict, or any object with `to_dict()`.

    Raises:
        ModelLoadError: a needed field is missing or has a value that no native model supports.
    """
    hf = _as_dict(hf_config)
    architecture = architecture_of(hf)
    if architecture in _TEXT_HALF_OF:
        architecture = _TEXT_HALF_OF[architecture]
        outer, hf = hf, dict(_mapping(hf, "text_config"))
        hf.setdefault("eos_token_id", outer.get("eos_token_id"))
        hf["architectures"] = [architecture]
    is_native = architecture in NATIVE_ARCHITECTURES
    num_layers = _int(hf, "num_hidden_layers", "n_layer", "num_layers")
    hidden_size = _int(hf, "hidden_size", "n_embd", "d_model")
    num_q_heads = _int(hf, "num_attention_heads", "n_head")
    layer_types, sliding_window = _layer_types(hf, architecture, num_layers)
    is_gemma = architecture.startswith("Gemma")
    has_attention_bias = architecture == "Qwen2ForCausalLM" or bool(hf.get("attention_bias"))
    return ModelConfig(
        architecture=architecture,
        model_type=str(hf.get("model_type") or ""),
        vocab_size=_int(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_optional_int(hf, "intermediate_size", "n_inner", "ffn_dim") or 0,
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=_optional_int(hf, "num_key_value_heads") or num_q_heads,
        head_dim=_optional_int(hf, "head_dim") or (256 if is_gemma else hidden_size // max(num_q_heads, 1)),
        norm_eps=_float(hf, 1e-6, "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
        rope=_rope(hf, is_native),
        max_position=_optional_int(hf, "max_position_embeddings", "n_positions", "n_ctx") or 2048,
        tie_embeddings=bool(hf.get("tie_word_embeddings", is_gemma or architecture == "SmolLM3ForCausalLM")),
        attention_bias=has_attention_bias,
        attention_out_bias=has_attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(hf.get("mlp_bias")),
        qk_norm=architecture in ("Qwen3ForCausalLM", "Gemma3ForCausalLM"),
        activation=_activation(hf, is_native),
        sliding_window=sliding_window,
        layer_types=layer_types,
        attn_soft_cap=_optional_float(hf, "attn_logit_softcapping"),
        final_soft_cap=_optional_float(hf, "final_logit_softcapping"),
        query_scale=_optional_float(hf, "query_pre_attn_scalar") or (256.0 if is_gemma else None),
        embedding_scale=math.sqrt(hidden_size) if is_gemma else 1.0,
        no_rope_layers=_no_rope_layers(hf, architecture, num_layers),
        eos_token_ids=_token_ids(hf, "eos_token_id"),
        bos_token_id=next(iter(_token_ids(hf, "bos_token_id")), None),
        dtype=_dtype(hf),
        hf_config=hf,
    )


def architecture_of(hf: Mapping[str, object]) -> str:
    """The Hugging Face class name that a configuration names, or that its model_type implies."""
    names = hf.get("architectures")
    if isinstance(names, list | tuple) and names:
        return str(names[0])
    model_type = str(hf.get("model_type") or "")
    if model_type in _ARCHITECTURE_BY_MODEL_TYPE:
        return _ARCHITECTURE_BY_MODEL_TYPE[model_type]
    raise ModelLoadError(f"model config: architectures is missing and model_type={model_type!r} does not imply one")


def _as_dict(hf_config: object) -> dict[str, object]:
    if isinstance(hf_config, Mapping):
        return dict(hf_config)
    to_dict = getattr(hf_config, "to_dict", None)
    if not callable(to_dict):
        raise ModelLoadError(f"model config: expected a dict or a transformers config, got {type(hf_config).__name__}")
    return dict(to_dict())


def _layer_types(
    hf: Mapping[str, object], architecture: str, num_layers: int
) -> tuple[tuple[LayerType, ...], int | None]:
    window = _optional_int(hf, "sliding_window")
    if hf.get("use_sliding_window") is False:
        window = None
    if window is None:
        return (LayerType.FULL,) * num_layers, None
    names = hf.get("layer_types")
    if isinstance(names, list | tuple):
        types = tuple(LayerType.SLIDING if "sliding" in str(name) else LayerType.FULL for name in names)
    elif architecture == "MistralForCausalLM":
        types = (LayerType.SLIDING,) * num_layers
    elif architecture == "Gemma2ForCausalLM":
        types = tuple(LayerType.FULL if i % 2 else LayerType.SLIDING for i in range(num_layers))
    elif architecture == "Gemma3ForCausalLM":
        period = _optional_int(hf, "sliding_window_pattern", "_sliding_window_pattern") or 6
        types = tuple(LayerType.SLIDING if (i + 1) % period else LayerType.FULL for i in range(num_layers))
    elif hf.get("use_sliding_window"):
        first = _optional_int(hf, "max_window_layers") or 0
        types = tuple(LayerType.SLIDING if i >= first else LayerType.FULL for i in range(num_layers))
    else:
        types = (LayerType.FULL,) * num_layers
    return types, window if LayerType.SLIDING in types else None


def _rope(hf: Mapping[str, object], is_native: bool) -> RopeConfig:
    local_theta = _optional_float(hf, "rope_local_base_freq")
    parameters = hf.get("rope_parameters")
    if isinstance(parameters, Mapping) and "full_attention" in parameters:
        local_theta = _optional_float(_mapping(parameters, "sliding_attention"), "rope_theta") or local_theta
        parameters = _mapping(parameters, "full_attention")
    if not isinstance(parameters, Mapping):
        old_style = hf.get("rope_scaling")
        parameters = old_style if isinstance(old_style, Mapping) else {}
    theta = _float(parameters, _float(hf, 10000.0, "rope_theta"), "rope_theta")
    name = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if not is_native:
        return RopeConfig(theta=theta)
    partial = _optional_float(parameters, "partial_rotary_factor") or _optional_float(hf, "partial_rotary_factor")
    if partial not in (None, 1.0):
        raise ModelLoadError(f"model config: partial_rotary_factor={partial} is not supported (only 1.0)")
    names = {"default": RopeScaling.NONE, **{member.value: member for member in RopeScaling}}
    if name not in names:
        raise ModelLoadError(f"model config: rope_type={name!r} is not supported (known: {', '.join(sorted(names))})")
    scaling = names[name]
    original = _optional_int(parameters, "original_max_position_embeddings")
    return RopeConfig(
        theta=theta,
        scaling=scaling,
        factor=_float(parameters, 1.0, "factor"),
        original_max_position=original
        or _optional_int(hf, "original_max_position_embeddings", "max_position_embeddings"),
        low_freq_factor=_float(parameters, 1.0, "low_freq_factor"),
        high_freq_factor=_float(parameters, 4.0, "high_freq_factor"),
        beta_fast=_float(parameters, 32.0, "beta_fast"),
        beta_slow=_float(parameters, 1.0, "beta_slow"),
        attention_factor=_optional_float(parameters, "attention_factor"),
        mscale=_optional_float(parameters, "mscale"),
        mscale_all_dim=_optional_float(parameters, "mscale_all_dim"),
        is_truncated=bool(parameters.get("truncate", True)),
        local_theta=local_theta,
    )


def _no_rope_layers(hf: Mapping[str, object], architecture: str, num_layers: int) -> frozenset[int]:
    if architecture != "SmolLM3ForCausalLM":
        return frozenset()
    flags = hf.get("no_rope_layers")  # despite its name: 1 means that the layer has rope
    if isinstance(flags, list | tuple) and flags:
        return frozenset(i for i, has_rope in enumerate(flags[:num_layers]) if not has_rope)
    interval = _optional_int(hf, "no_rope_layer_interval") or 4
    return frozenset(i for i in range(num_layers) if (i + 1) % interval == 0)


def _activation(hf: Mapping[str, object], is_native: bool) -> Activation:
    name = str(hf.get("hidden_activation") or hf.get("hidden_act") or hf.get("activation_function") or "silu")
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    if is_native:
        raise ModelLoadError(f"model config: hidden_act={name!r} is not supported (known: {', '.join(_ACTIVATIONS)})")
    return Activation.SILU


def _dtype(hf: Mapping[str, object]) -> str:
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in DTYPE_NAMES else "float32"


def _token_ids(hf: Mapping[str, object], key: str) -> tuple[int, ...]:
    value = hf.get(key)
    ids = value if isinstance(value, list | tuple) else [value]
    return tuple(int(one) for one in ids if isinstance(one, int) and one >= 0)


def _mapping(hf: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = hf.get(key)
    if not isinstance(value, Mapping):
        raise ModelLoadError(f"model config: {key}={value!r} must be an object")
    return value


def _optional_float(hf: Mapping[str, object], *keys: str) -> float | None:
    for key in keys:
        value = hf.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelLoadError(f"model config: {key}={value!r} must be a number")
        return float(value)
    return None


def _float(hf: Mapping[str, object], default: float, *keys: str) -> float:
    value = _optional_float(hf, *keys)
    return default if value is None else value


def _optional_int(hf: Mapping[str, object], *keys: str) -> int | None:
    value = _optional_float(hf, *keys)
    if value is None:
        return None
    if not value.is_integer():
        raise ModelLoadError(f"model config: {keys[0]}={value!r} must be a whole number")
    return int(value)


def _int(hf: Mapping[str, object], *keys: str) -> int:
    value = _optional_int(hf, *keys)
    if value is None:
        raise ModelLoadError(f"model config: {keys[0]} is missing")
    return value
