"""Engine flags, made from the fields of `graphrunner.config.engine_config`: one place, one help text."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

import typer

from graphrunner.config.options import SECTIONS

_HIDDEN = {"model"}  # given as --model by the command itself


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every engine flag. It must take `model` and `engine_options: dict`."""
    own = [p for name, p in inspect.signature(command).parameters.items() if name != "engine_options"]
    flags = [_flag(section, field.name) for section in SECTIONS.values() for field in fields(section)]
    flags = [flag for flag in flags if flag.name not in _HIDDEN]
    names = {flag.name for flag in flags}

    def run(**given: object) -> None:
        options = {name: value for name, value in given.items() if name in names and value is not None}
        mine = {name: value for name, value in given.items() if name not in names}
        command(**mine, engine_options=options)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    keyword = inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(command, include_extras=True)
    parameters = [p.replace(kind=keyword, annotation=hints[p.name]) for p in own] + flags
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _flag(section: type, name: str) -> inspect.Parameter:
    """One option; None means that the user did not give it."""
    hint = get_type_hints(section)[name]
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    kind: Any = kinds[0]
    if isinstance(kind, type) and issubclass(kind, Enum):
        kind = str
    if kind not in (int, float, str, bool):
        kind = list[int]
    keyword = inspect.Parameter.KEYWORD_ONLY
    annotation = Annotated[
        kind | None, typer.Option(help=_help(section)[name], rich_help_panel="Engine", show_default=False)
    ]
    return inspect.Parameter(name, keyword, default=None, annotation=annotation)


@cache
def _help(section: type) -> dict[str, str]:
    """The text under each field of a section."""
    body = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for here, following in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name) and is_text:
            found[here.target.id] = str(following.value.value)  # type: ignore[attr-defined]
    return found
