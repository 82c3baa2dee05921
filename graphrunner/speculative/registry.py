"""Which file a method is in. A new proposer is one line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType, ModuleType

from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.errors import ConfigError
from graphrunner.speculative.proposer import DeviceProposer, HostProposer, Proposer, Target
from graphrunner.weights.source import ModelSource

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
    module = _module_of(config)
    factory = getattr(module, "create_proposer", None)
    if factory is None:
        problem = f"module {module.__name__} has no create_proposer"
        raise ConfigError("speculative_config.method", config.method, problem)
    proposer = factory(config, target)
    if not isinstance(proposer, HostProposer | DeviceProposer):
        problem = (
            f"create_proposer of {module.__name__} returned {proposer!r}, which is no HostProposer or DeviceProposer"
        )
        raise ConfigError("speculative_config.method", config.method, problem)
    return proposer


def settled(config: SpeculativeConfig, source: ModelSource) -> SpeculativeConfig:
    """The configuration with a number of drafts in it.

    A method that knows a better default than the common one says so in
    `default_num_drafts(config: SpeculativeConfig, source: ModelSource) -> int`, beside its `create_proposer`.

    Args:
        source: of the target.

    Raises:
        ConfigError, ModelLoadError: as `create_proposer`.
    """
    count = getattr(_module_of(config), "default_num_drafts", None)
    if config.num_speculative_tokens is not None or count is None:
        return config
    return replace(config, num_speculative_tokens=count(config, source))


def _module_of(config: SpeculativeConfig) -> ModuleType:
    path = PROPOSERS.get(config.method, config.method)
    try:
        return import_module(path)
    except (ImportError, TypeError) as error:  # TypeError: a path that starts with a dot
        known = ", ".join(PROPOSERS)
        problem = f"is neither one of {known} nor a module that can be imported ({error})"
        raise ConfigError("speculative_config.method", config.method, problem) from None
