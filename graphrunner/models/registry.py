"""Which file an architecture is in. A new one is one line here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from graphrunner.config.model_config import ModelConfig
from graphrunner.core.errors import ModelLoadError
from graphrunner.models.causal_lm import CausalLM
from graphrunner.models.options import ModelOptions

NATIVE_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "SmolLM3ForCausalLM": "smollm3",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "Gemma2ForCausalLM": "gemma2",
        "Gemma3ForCausalLM": "gemma3",
    }
)
"""Architecture, as a checkpoint's config names it, to the module of this package that holds the class."""


def native_model_class(architecture: str) -> type[CausalLM] | None:
    """The class of an architecture, imported now; None when the transformers fallback must serve it."""
    module_name = NATIVE_MODELS.get(architecture)
    if module_name is None:
        return None
    return getattr(import_module(f"graphrunner.models.{module_name}"), architecture)


def build_model(config: ModelConfig, options: ModelOptions) -> CausalLM:
    """An empty native model, ready for `load_weights`. Projections take memory only as their tensors arrive.

    Raises:
        ModelLoadError: the architecture has no file here.
    """
    model_class = native_model_class(config.architecture)
    if model_class is None:
        raise ModelLoadError(
            f"architecture {config.architecture} has no native model; known: {', '.join(NATIVE_MODELS)}"
        )
    return model_class(config, options)
