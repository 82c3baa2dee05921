"""Which file a method is in. A new proposer is one line here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.errors import ConfigError
from graphrunner.speculative.proposer import Proposer, Target

PROPOSERS: Mapping[str, str] = MappingProxyType(
    {
        "ngram": "graphrunner.speculative.ngram",
        "draft_model": "graphrunner.speculative.draft_model",
        "eagle": "graphrunner.speculative.eagle",
        "mtp": "graphrunner.speculative.mtp",
        "frozen_kv_mtp": "graphrunner.speculative.frozen_kv_mtp",
    }
)
"""Method to the module with `create_proposer(config: SpeculativeConfig, target: Target) -> Proposer`."""


def create_proposer(config: SpeculativeConfig, target: Target) -> Proposer:
    """The proposer of a method, loaded and not yet bound.

    Raises:
        ConfigError: no such method, or a setting of it that cannot work.
        ModelLoadError: its weights.
    """
    path = PROPOSERS.get(config.method, config.method)
    try:
        module = import_module(path)
    except (ImportError, TypeError) as error:  # TypeError: a path that starts with a dot
        known = ", ".join(PROPOSERS)
        problem = f"is neither one of {known} nor a module that can be imported ({error})"
        raise ConfigError("speculative_config.method", config.method, problem) from None
    factory = getattr(module, "create_proposer", None)
    if factory is None:
        raise ConfigError("speculative_config.method", config.method, f"module {path} has no create_proposer")
    return factory(config, target)
