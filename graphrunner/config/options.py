"""Flat options, as keyword arguments and flags have them, to the sections of `EngineConfig`."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from graphrunner.config.engine_config import (
    CacheConfig,
    CapturePolicy,
    EngineConfig,
    GraphBackend,
    GraphConfig,
    LoadConfig,
    SchedulerConfig,
    TelemetryConfig,
)
from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.errors import ConfigError

SECTIONS: Mapping[str, type] = MappingProxyType(
    {
        "load": LoadConfig,
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
        "graph": GraphConfig,
        "telemetry": TelemetryConfig,
    }
)
ALIASES: Mapping[str, str] = MappingProxyType(
    {"block_size": "page_size", "num_gpu_blocks_override": "num_pages", "max_num_tokens": "max_num_batched_tokens"}
)
"""Names that users of other engines know."""

SPECULATIVE_SHORT: Mapping[str, str] = MappingProxyType(
    {"speculative": "method", "num_speculative_tokens": "num_speculative_tokens", "speculative_model": "model"}
)
"""Options that stand for one entry of `speculative_config`."""

ACCEPTED_WHEN_DEFAULT: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "tensor_parallel_size": (1,),
        "pipeline_parallel_size": (1,),
        "swap_space": (0, 4),
        "disable_log_stats": (True, False),
        "enable_chunked_prefill": (True, None),
    }
)
"""Arguments of other engines' constructors whose only honest value here is the one given."""


def engine_config_from_options(options: Mapping[str, object]) -> EngineConfig:
    """Build the configuration from flat names.

    Args:
        options: field names of any section, or `ALIASES`; enums may be given by value; None keeps the default.

    Raises:
        ConfigError: unknown name (with the closest known one) or a value that cannot be.
    """
    given = {ALIASES.get(name, name): value for name, value in options.items()}
    if _converted("enforce_eager", given.pop("enforce_eager", None), bool):
        given |= {"capture": CapturePolicy.OFF, "decode_graph": GraphBackend.OFF, "prefill_graph": GraphBackend.OFF}
    for name, allowed in ACCEPTED_WHEN_DEFAULT.items():
        if name in given and given.pop(name) not in allowed:
            raise ConfigError(name, options[name], f"only {allowed[0]!r} is supported")
    sections = {name: _section(section, given) for name, section in SECTIONS.items()}
    top: dict[str, object] = {"num_threads": _converted("num_threads", given.pop("num_threads", None), int)}
    speculative = _speculative(given)
    if speculative is not None:
        top["speculative"] = SpeculativeConfig.from_mapping(speculative)
    if given:
        name = next(iter(given))
        raise ConfigError(name, given[name], f"unknown option{_closest(name)}")
    return EngineConfig(**sections, **top)  # type: ignore[arg-type]


def _speculative(given: dict[str, object]) -> Mapping[str, object] | None:
    """What stands in `speculative_config`, and over it what the short names say; None when nothing was said."""
    whole = given.pop("speculative_config", None)
    said = {name: given.pop(key, None) for key, name in SPECULATIVE_SHORT.items()}
    short = {name: value for name, value in said.items() if value is not None}
    if whole is None:
        if short and "method" not in short:
            key = next(key for key, name in SPECULATIVE_SHORT.items() if name in short)
            raise ConfigError(key, short[SPECULATIVE_SHORT[key]], "needs a method: speculative='ngram', for one")
        return short or None
    if not isinstance(whole, Mapping):
        raise ConfigError("speculative_config", whole, "must be a mapping, as {'method': 'ngram'}")
    return {**whole, **short}


def _section(section: type, given: dict[str, object]) -> object:
    """Take this section's fields out of `given` and build it."""
    hints = get_type_hints(section)
    values: dict[str, Any] = {}
    for field in fields(section):
        if field.name not in given:
            continue
        value = given.pop(field.name)
        if value is None and field.default is not MISSING and field.default is not None:
            continue
        values[field.name] = _converted(field.name, value, hints[field.name])
    return section(**values)


def _converted(name: str, value: object, hint: Any) -> object:
    """`value` as the field's type; strings become enum members, lists become tuples."""
    kinds = get_args(hint) or (hint,)
    enum = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)), None)
    if enum is not None and not isinstance(value, enum):
        try:
            return enum(value)
        except ValueError:
            raise ConfigError(name, value, f"must be one of {', '.join(item.value for item in enum)}") from None
    if value is not None and tuple[int, ...] in kinds:
        return _whole_numbers(name, value)
    if isinstance(value, PurePath):
        value = str(value)
    plain = tuple(kind for kind in kinds if isinstance(kind, type) and kind in (int, float, str, bool))
    if plain and not isinstance(value, plain) and not (float in plain and isinstance(value, int)) and value is not None:
        raise ConfigError(name, value, f"must be {' or '.join(kind.__name__ for kind in plain)}")
    if int in plain and bool not in plain and isinstance(value, bool):
        raise ConfigError(name, value, "must be int")
    return value


def _whole_numbers(name: str, value: object) -> tuple[int, ...]:
    items = value if isinstance(value, (list, tuple)) else (None,)
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise ConfigError(name, value, "must be a list of whole numbers")
    return tuple(items)


def _closest(name: str) -> str:
    from difflib import get_close_matches

    known = [field.name for section in SECTIONS.values() for field in fields(section)] + list(ALIASES)
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
