"""Drafts that come with the package, and which target each is for."""

from __future__ import annotations

from pathlib import Path

from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.errors import ConfigError
from graphrunner.models.causal_lm import CausalLM
from graphrunner.speculative.proposer import Target
from graphrunner.weights.source import EMBEDDED_NAME, ModelSource

_FOLDER = Path(__file__).with_name("data")


def draft_path(config: SpeculativeConfig, source: ModelSource) -> str:
    """The draft that the user named, or else the one shipped for the target that `source` is.

    Raises:
        ConfigError: neither.
    """
    if config.model is not None:
        return config.model
    is_embedded = source.is_embedded or Path(source.name).name.startswith(EMBEDDED_NAME)
    folder = _FOLDER / f"{EMBEDDED_NAME}-{config.method}"
    if is_embedded and folder.is_dir():
        return str(folder)
    problem = f"must name a draft: none is shipped for method {config.method} and target {source.name}"
    raise ConfigError("speculative_config.model", config.model, problem)


def native_target(config: SpeculativeConfig, target: Target) -> CausalLM:
    """The target as drafts on hidden states need it. Raises ConfigError when it is a foreign model."""
    if isinstance(target.model, CausalLM):
        return target.model
    problem = f"reads hidden states, which only native models hand out; {target.source.name} runs in transformers"
    raise ConfigError("speculative_config.method", config.method, problem)
