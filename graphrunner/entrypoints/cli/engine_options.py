"""Flags made from the fields of configuration dataclasses: one place, one help text, for the engine and the server."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from graphrunner.config.options import SECTIONS
from graphrunner.core.errors import ConfigError

_PANELS: Mapping[str, str] = {
    "load": "Model",
    "cache": "KV cache",
    "scheduler": "Scheduler",
    "graph": "Graphs",
    "telemetry": "Telemetry",
}
_NUM_DRAFTS_HELP = "Most draft tokens a round, 1 to 16. (default: 4; mtp: its number of heads)"
_SPECULATIVE_HELP = "Verify draft tokens made by this method: ngram, draft_model, ... (docs/speculative.md)."
_PLAIN = (int, float, str, bool, Path)
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every engine flag that it does not take itself. It must take `engine_options: dict`.

    Only flags that were given are in it, so it can be handed to `LLM` or `engine_config_from_options`.
    """
    sections = [(section, _PANELS[name]) for name, section in SECTIONS.items()]
    extra = (
        _parameter("speculative", str, _SPECULATIVE_HELP, "Speculation", default=None),
        _parameter("num_speculative_tokens", int, _NUM_DRAFTS_HELP, "Speculation", default=None),
        _parameter("speculative_model", str, "Hub id, folder or file of the draft.", "Speculation", default=None),
        _parameter("speculative_config", str, "Every setting of it, as a JSON object.", "Speculation", default=None),
        _parameter("num_threads", int, "CPU threads; without it the physical cores.", "Model", default=None),
        _parameter("enforce_eager", bool, "Record no graphs at all.", "Graphs", default=None),
    )
    return _with_options(command, "engine_options", sections, extra)


def with_server_options(command: Callable[..., None], options: type) -> Callable[..., None]:
    """Give a command the flags of `ServerOptions`. It must take `server_options: dict`."""
    return _with_options(command, "server_options", [(options, "Server")], ())


def _with_options(
    command: Callable[..., None],
    keyword: str,
    sections: list[tuple[type, str]],
    extra: tuple[inspect.Parameter, ...],
) -> Callable[..., None]:
    """A command with the flags of `sections` in place of the parameter `keyword`, which gets those given."""
    own = {name: one for name, one in inspect.signature(command).parameters.items() if name != keyword}
    made = [_field_parameter(section, field, panel) for section, panel in sections for field in fields(section)]
    flags = {flag.name: flag for flag in (*made, *extra) if flag.name not in own}
    kinds = {field.name: get_type_hints(section)[field.name] for section, _ in sections for field in fields(section)}

    def run(**given: object) -> None:
        chosen = {
            name: _value(name, value, kinds.get(name))
            for name, value in given.items()
            if name in flags and value not in (None, [])
        }
        command(**{name: value for name, value in given.items() if name in own}, **{keyword: chosen})

    hints = getattr(command, "__annotations__", {}) if hasattr(command, "__signature__") else _hints(command)
    parameters = [one.replace(kind=_KEYWORD, annotation=hints[name]) for name, one in own.items()]
    parameters += flags.values()
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _hints(command: Callable[..., None]) -> dict[str, Any]:
    return get_type_hints(command, include_extras=True)


def _field_parameter(section: type, field: Field[Any], panel: str) -> inspect.Parameter:
    hint = get_type_hints(section)[field.name]
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    kind = kinds[0] if get_origin(hint) is not tuple else hint
    default = None if field.default is MISSING else field.default
    help_text = _help(section)[field.name]
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = ", ".join(item.value for item in kind)
        help_text = help_text if choices in help_text else f"{help_text} One of: {choices}."
        kind, default = str, default.value if isinstance(default, Enum) else default
    elif get_origin(kind) is tuple:
        kind = list[str] if get_args(kind)[0] is str else str
        help_text = help_text if kind is not str else f"{help_text} As 1,2,4."
    return _parameter(field.name, kind, help_text, panel, default=default)


def _parameter(name: str, kind: Any, help_text: str, panel: str, *, default: object) -> inspect.Parameter:
    """One option; it is None when the user did not give it, and the help shows what holds then."""
    assert kind in _PLAIN or get_origin(kind) is list, f"no flag can be made for {name}: {kind}"
    if default not in (None, ()):
        shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
        help_text = f"{help_text} (default: {shown})"
    option = typer.Option(help=help_text, rich_help_panel=panel, show_default=False)
    return inspect.Parameter(name, _KEYWORD, default=None, annotation=Annotated[kind | None, option])


def _value(name: str, value: object, hint: Any) -> object:
    """What the configuration expects, from what the flag gave."""
    if name == "speculative_config":
        try:
            return json.loads(str(value))
        except ValueError:
            raise ConfigError(name, value, "must be a JSON object") from None
    parts = [hint, *get_args(hint)]
    if any(get_origin(part) is tuple and get_args(part)[0] is int for part in parts):
        try:
            return tuple(int(item) for item in str(value).split(","))
        except ValueError:
            raise ConfigError(name, value, "must be whole numbers joined by commas, as 1,2,4") from None
    return tuple(value) if isinstance(value, list) else value


@cache
def _help(section: type) -> dict[str, str]:
    """The text under each field of a section."""
    body = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for here, following in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name) and is_text:
            found[here.target.id] = " ".join(str(following.value.value).split())  # type: ignore[attr-defined]
    return found
