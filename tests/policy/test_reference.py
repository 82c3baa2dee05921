"""The generated pages are those of the code, and the site has every page."""

import re

import pytest
import yaml
from generate_reference import FOLDER, commands, pages

from graphrunner.entrypoints.openai.app import _POSTS

DOCS = FOLDER.parent
ROOT = DOCS.parent


@pytest.mark.parametrize("name", ["flags.md", "fields.md"])
def test_pages_are_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == pages()[name], "run: python scripts/generate_reference.py"


def test_every_flag_is_listed() -> None:
    page = (FOLDER / "flags.md").read_text()
    for name, command in commands().items():
        assert f"## graphrunner {name}\n" in page
        for option in command.params:
            assert f"`{option.opts[0]}" in page, f"{name} {option.opts[0]}"


def test_every_field_is_listed_and_told() -> None:
    page = (FOLDER / "fields.md").read_text()
    for path, _, body in _POSTS:
        section = page.partition(f"## POST {path}\n")[2].partition("\n## ")[0]
        told = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", section, re.M))
        assert set(told) == {field.alias or name for name, field in body.model_fields.items()}
        assert all(told.values()), path


def test_every_page_is_in_the_site() -> None:
    def leaves(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        children = node.values() if isinstance(node, dict) else node
        return [leaf for child in children for leaf in leaves(child)]  # type: ignore[attr-defined]

    listed = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted(there), "mkdocs.yml lists every page of docs/ once"


USER_PAGES = ("quickstart", "server", "metrics", "telemetry", "deployment", "security", "faq")
FLAGS_OF_OTHERS = {"--gpus", "--device"}
"""Of docker and podman."""


def test_pages_show_flags_that_exist() -> None:
    """A flag behind a `graphrunner` command exists; in the pages for users also one in backticks."""
    options = [option for command in commands().values() for option in command.params]
    known = {flag for option in options for flag in (*option.opts, *option.secondary_opts)} | {"--help", "--version"}
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md"]:
        pattern = r"^    graphrunner .+$" + (r"|`--[a-z][^`]*`" if page.stem in USER_PAGES else "")
        shown = " ".join(re.findall(pattern, page.read_text(), re.M))
        used = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", shown))
        assert used <= known | FLAGS_OF_OTHERS, f"{page.name}: {used - known}"
