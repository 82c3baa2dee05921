"""Write docs/reference/: every flag of every command, and every field of every body, from the code itself.

    python scripts/generate_reference.py

tests/policy/test_reference.py compares the pages with what this prints.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import get_args, get_type_hints

from field_words import WORDS
from pydantic import BaseModel
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from graphrunner.core.sampling_params import SamplingParams
from graphrunner.entrypoints.cli.main import app
from graphrunner.entrypoints.openai import protocol, responses_body
from graphrunner.entrypoints.openai.app import _POSTS

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
NOTICE = "Written from the code by `scripts/generate_reference.py`.\n"
Option = TyperOption | TyperArgument
TOLERATED = "accepted and without effect"
REFUSED = "not supported by this server"


def pages() -> dict[str, str]:
    """The text of every page, by file name."""
    return {"flags.md": "".join(_flags()), "fields.md": "".join(_fields())}


# -- flags ----------------------------------------------------------------------------------------------------------


def commands() -> dict[str, TyperCommand]:
    """Every command by the words that call it."""
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    found: dict[str, TyperCommand] = {}
    for name, command in root.commands.items():
        if isinstance(command, TyperGroup):
            found |= {f"{name} {sub}": each for sub, each in command.commands.items()}
        else:
            found[name] = command
    return found


def _flags() -> Iterator[str]:
    yield f"# Flags\n\n{NOTICE}\nEvery command has `--help`. `graphrunner --version` prints the version.\n"
    shared = _shared_panels()
    for name, command in commands().items():
        yield f"\n## graphrunner {name}\n\n{_one_line(command.help)}\n"
        own = [option for option in command.params if _panel(option) not in shared]
        if own:
            yield "\n" + _table(("flag", "what"), _flag_rows(command, own))
        if len(own) < len(command.params):
            yield "\nAnd the [flags of an engine](#flags-of-an-engine).\n"
    yield "\n## Flags of an engine\n\nAlso arguments of `LLM`, with underscores: `LLM(model, max_model_len=4096)`.\n"
    serve = commands()["serve"]
    for panel in shared:
        shown = [option for option in serve.params if _panel(option) == panel]
        yield f"\n### {panel}\n\n" + _table(("flag", "what"), _flag_rows(serve, shown))


def _flag_rows(command: TyperCommand, options: Sequence[Option]) -> list[tuple[str, str]]:
    assert command.callback is not None
    types = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    return [(_spelled(option, types), _help(option)) for option in options]


def _shared_panels() -> list[str]:
    """Panels of flags that every command with an engine has; listed once."""
    found = [dict.fromkeys(map(_panel, commands()[name].params)) for name in ("generate", "serve")]
    return [panel for panel in found[1] if panel is not None and panel in found[0]]


def _panel(option: Option) -> str | None:
    return getattr(option, "rich_help_panel", None)


def _spelled(option: Option, types: Mapping[str, object]) -> str:
    kind = _kind(types.get(option.name))
    names = [*option.opts, *option.secondary_opts]
    return ", ".join(f"`{name} {kind}`" if kind else f"`{name}`" for name in names)


def _kind(annotation: object) -> str:
    """What follows a flag; empty for a switch."""
    inner = [each for each in get_args(annotation) if each is not NoneType and not hasattr(each, "param_decls")]
    if inner:
        return _kind(inner[0])
    return {bool: "", int: "NUMBER", float: "NUMBER", Path: "FILE"}.get(annotation, "TEXT")  # type: ignore[call-overload]


def _help(option: Option) -> str:
    text = _one_line(getattr(option, "help", None)).replace("<", "&lt;")
    default = option.default
    if default in (None, False, ()) or callable(default) or "(default" in text:
        return text
    return f"{text} (default: {default})"


# -- fields ---------------------------------------------------------------------------------------------------------


def _fields() -> Iterator[str]:
    yield (
        f"# Fields\n\n{NOTICE}\nA field that is not listed is refused with 400 and its name. "
        "`GET /openapi.json` has the same as a schema.\n"
    )
    for path, _, body in _POSTS:
        rows = _rows(body)
        yield f"\n## POST {path}\n\n" + (_table(("field", "type", "what"), rows) if rows else "No fields: `{}`.\n")
    yield "\n## Parts\n"
    for kind in _parts():
        yield f"\n### {kind.__name__}\n"
        doc = inspect.getdoc(kind) if "__doc__" in vars(kind) else None
        yield f"\n{_one_line(doc)}\n\n" if doc else "\n"
        yield _table(("field", "type", "what"), _rows(kind))


def _parts() -> list[type[BaseModel]]:
    """Every model that a body is made of and that is no body itself."""
    bodies = {body for _, _, body in _POSTS}
    found = [
        kind
        for module in (protocol, responses_body)
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, protocol.Body) and kind.__module__ == module.__name__
    ]
    abstract = {protocol.Body, protocol.GenerationBody}
    return [kind for kind in found if kind not in bodies and kind not in abstract]


def _rows(kind: type[BaseModel]) -> list[tuple[str, str, str]]:
    schema = kind.model_json_schema()
    required = set(schema.get("required", ()))
    rows = []
    for name, described in schema["properties"].items():
        text = described.get("description", "")
        if text == REFUSED:
            allowed = _allowed(kind, name)
            rows.append((f"`{name}`", "", f"refused, except {allowed}" if allowed else "refused"))
        elif text == TOLERATED:
            rows.append((f"`{name}`", "any", text))
        else:
            what = ["required"] if name in required else []
            rows.append((f"`{name}`", _type(described), "; ".join([*what, _words(kind, name), *_bounds(described)])))
    return rows


def _words(kind: type[BaseModel], name: str) -> str:
    """What a field means. Raises KeyError when nobody has said it."""
    for key in (f"{kind.__name__}.{name}", name):
        if key in WORDS:
            return WORDS[key]
    return _sampling_help()[name] if name in _sampling_help() else WORDS[f"Body.{name}"]


def _allowed(kind: type[BaseModel], name: str) -> str:
    """Values of a refused field that ask for nothing."""
    tables: tuple[Mapping[str, tuple[object, ...]], ...] = (protocol._REFUSED_IN_CHAT, responses_body._ALLOWED)
    table = tables[kind.__module__ == responses_body.__name__]
    nested = {responses_body.TextConfig: "text.", responses_body.ReasoningConfig: "reasoning."}.get(kind, "")  # type: ignore[call-overload]
    if kind is protocol.CompletionBody:
        return ""
    return ", ".join(f"`{_json(value)}`" for value in table.get(nested + name, ()))


def _json(value: object) -> str:
    return json.dumps(value)


def _type(described: Mapping[str, object]) -> str:
    options = described.get("anyOf") or described.get("oneOf")
    if isinstance(options, list):
        names = [_type(option) for option in options if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(names))
    if "$ref" in described:
        name = str(described["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in described:
        return f"`{_json(described['const'])}`"
    if "enum" in described:
        return " or ".join(f"`{_json(value)}`" for value in described["enum"])  # type: ignore[attr-defined]
    if described.get("type") == "array":
        return f"list of {_type(described['items'])}"  # type: ignore[arg-type]
    return str(described.get("type", "any"))


def _bounds(described: Mapping[str, object]) -> list[str]:
    options = [described, *(described.get("anyOf") or ())]  # type: ignore[misc]
    words = {
        "minimum": "at least {}",
        "maximum": "at most {}",
        "exclusiveMaximum": "below {}",
        "minItems": "at least {} of them",
        "maxItems": "at most {} of them",
        "maxProperties": "at most {} of them",
    }
    return [words[key].format(value) for option in options for key, value in option.items() if key in words]


def _sampling_help() -> dict[str, str]:
    """What `SamplingParams` says about its arguments, by name."""
    doc = inspect.getdoc(SamplingParams) or ""
    section = doc.partition("Args:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    for names, text in re.findall(r"^    ([a-z_, ]+): (.+(?:\n {8}.+)*)$", section, re.M):
        found |= {name.strip(): " ".join(text.split()).rstrip(".") for name in names.split(",")}
    return found


# -- words ----------------------------------------------------------------------------------------------------------


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [" | ".join(row) for row in [list(head), ["---"] * len(head), *cells]]
    return "".join(f"| {line} |\n" for line in lines)


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{FOLDER / name}: {len(text.splitlines())} lines\n")


if __name__ == "__main__":
    main()
