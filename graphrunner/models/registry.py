"""Which file an architecture is in, and how a found checkpoint becomes a model. A new file is one line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from importlib import import_module
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from graphrunner.attention.backend import GraphSupport
from graphrunner.config.checkpoint_quantization import CheckpointQuantization
from graphrunner.config.model_config import ModelConfig
from graphrunner.config.quantization import Quantization
from graphrunner.core.errors import ConfigError, ModelLoadError
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.kvcache.pool import KVSpec
from graphrunner.models.causal_lm import CausalLM
from graphrunner.models.options import ModelOptions
from graphrunner.weights.checkpoint import iterate_weights
from graphrunner.weights.progress import OnProgress
from graphrunner.weights.source import ModelSource, SourceKind

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


class ModelImpl(Enum):
    """Whose code runs the model."""

    AUTO = "auto"
    NATIVE = "native"
    TRANSFORMERS = "transformers"


class LanguageModel(Protocol):
    """What everyone above models may use: `CausalLM` and `TransformersCausalLM` are both this."""

    config: ModelConfig
    options: ModelOptions
    kv_spec: KVSpec
    graph_support: GraphSupport

    def __call__(
        self, batch: ForwardBatch, only_logits_rows: bool = False, taps: dict[int, Tensor] | None = None
    ) -> Tensor:
        """See `CausalLM.forward`."""

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """See `CausalLM.logits`."""

    def greedy_tokens(self, hidden_rows: Tensor) -> Tensor | None:
        """See `CausalLM.greedy_tokens`."""

    def final_norm(self, hidden_rows: Tensor) -> Tensor:
        """See `CausalLM.final_norm`."""


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
        known = ", ".join(NATIVE_MODELS)
        raise ModelLoadError(f"architecture {config.architecture} has no native model; known: {known}")
    return model_class(config, options)


def load_model(
    source: ModelSource,
    config: ModelConfig,
    options: ModelOptions,
    *,
    impl: ModelImpl = ModelImpl.AUTO,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> LanguageModel:
    """Build the model that `source` holds and fill it.

    Args:
        source, config: from weights.source.
        options: where and in which numbers it runs.
        impl: AUTO prefers a native file and falls back to transformers.
        seed: of dummy weights.

    Raises:
        ModelLoadError: something of the checkpoint is missing, unknown or does not fit.
        ConfigError: `impl` or the quantization cannot be had for this checkpoint.
    """
    is_native = native_model_class(config.architecture) is not None and impl is not ModelImpl.TRANSFORMERS
    checkpoint = config.checkpoint_quantization
    if checkpoint is not None:
        _check_packing(checkpoint, options.quantization, is_native)
        options = replace(options, quantization=Quantization.NONE)
    if is_native:
        model = build_model(config, options)
        dtype = options.weight_dtype or options.dtype
        model.load_weights(
            iterate_weights(
                source,
                config,
                dtype=dtype,
                device=options.device,
                quantization=options.quantization,
                seed=seed,
                on_progress=on_progress,
            )
        )
        return model
    if impl is ModelImpl.NATIVE:
        raise ConfigError("model_impl", impl.value, f"{config.architecture} has no native model; use auto")
    if source.kind is SourceKind.GGUF:
        raise ConfigError("model_impl", impl.value, f"{source.name} is a GGUF file, which only native models read")
    from graphrunner.models.transformers_fallback import TransformersCausalLM

    if source.kind is SourceKind.DUMMY:
        return TransformersCausalLM.with_random_weights(source.path, config, options, seed)
    return TransformersCausalLM.from_folder(source.path, config, options)


def _check_packing(checkpoint: CheckpointQuantization, asked: Quantization, is_native: bool) -> None:
    if not checkpoint.agrees_with(asked):
        problem = f"the checkpoint is packed as {checkpoint.packing.value} already; leave it out"
        raise ConfigError("quantization", asked.value, problem)
    if not is_native:
        problem = f"packed weights ({checkpoint.method}) need a native model; use auto"
        raise ConfigError("model_impl", ModelImpl.TRANSFORMERS.value, problem)


def reload_weights(
    model: LanguageModel, source: ModelSource, *, seed: int = 0, on_progress: OnProgress | None = None
) -> None:
    """Read the checkpoint again, into the memory the model has: addresses stay, so recorded graphs stay valid.

    Args:
        model: from `load_model`, of the same source.

    Raises:
        ModelLoadError: something of the checkpoint is missing, unknown or does not fit; the weights are mixed then.
    """
    options = model.options
    if isinstance(model, CausalLM):
        dtype = options.weight_dtype or options.dtype
        weights = iterate_weights(
            source, model.config, dtype=dtype, device=options.device, seed=seed, on_progress=on_progress, has_room=True
        )
        model.load_weights(weights)
        return
    from graphrunner.models.transformers_fallback import TransformersCausalLM

    assert isinstance(model, TransformersCausalLM)
    model.reload(source.path, None if source.kind is not SourceKind.DUMMY else seed)
