"""The house rules that a machine can check."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "graphrunner"
SOURCES = sorted(PACKAGE.rglob("*.py"))
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


def _tracked_text_files() -> list[Path]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    suffixes = {".py", ".md", ".toml", ".cpp", ".h", ".txt", ".html", ".json", ".yml", ".yaml", ".csv", ""}
    return [ROOT / name for name in names if name and Path(name).suffix in suffixes and (ROOT / name).is_file()]


@pytest.mark.parametrize("init", sorted(p for p in PACKAGE.rglob("__init__.py") if p.parent != PACKAGE), ids=str)
def test_package_says_what_it_owns(init: Path) -> None:
    doc = ast.get_docstring(ast.parse(init.read_text())) or ""
    lines = doc.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["Owns", "May import", "Must not contain"], init


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_and_function_size(source: Path) -> None:
    text = source.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES, f"{source} is past {MAX_FILE_LINES} lines: is it two things?"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and "triton" not in source.parts:
            doc = ast.get_docstring(node, clean=False) or ""
            length = (node.end_lineno or 0) - node.lineno + 1 - len(doc.splitlines())
            assert length <= MAX_FUNCTION_LINES, f"{source}:{node.lineno} {node.name} has {length} lines"


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_source_is_ascii_and_finished(source: Path) -> None:
    text = source.read_text()
    assert text.isascii(), f"{source} is not ASCII"
    for mark in ("NotImplementedError", "TO" + "DO", "FIX" + "ME"):
        assert mark not in text, f"{source} holds {mark}"


def test_only_env_reads_the_environment() -> None:
    readers = [s for s in SOURCES if re.search(r"os\.(environ|getenv)", s.read_text())]
    assert [r.relative_to(PACKAGE).as_posix() for r in readers] == ["config/env.py"]


@pytest.mark.parametrize("doc", DOCS, ids=lambda p: str(p.relative_to(ROOT)))
def test_doc_links_lead_somewhere(doc: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", doc.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (doc.parent / target).exists(), f"{doc}: {target}"


@pytest.mark.parametrize("doc", DOCS, ids=lambda p: str(p.relative_to(ROOT)))
def test_doc_names_existing_files(doc: Path) -> None:
    """A path of the package that a page names in backticks exists."""
    for path in re.findall(
        r"`((?:graphrunner|benchmarks|tests|docs)/[\w/.-]+\.(?:py|md|cpp|json|html))`", doc.read_text()
    ):
        if not re.search(r"my_|toy_|<", path):
            assert (ROOT / path).exists(), f"{doc}: {path}"


def test_readme_commands_exist() -> None:
    """Every make target and every graphrunner command that the README shows is there."""
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    shown = set(re.findall(r"^\s*make ([a-z-]+)", readme, re.M))
    assert shown and shown <= targets, shown - targets
    from typer.main import get_command

    from graphrunner.entrypoints.cli.main import app

    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    used = set(re.findall(r"^\s*(?:\.venv/bin/)?graphrunner ([a-z]+)", readme, re.M))
    assert used and used <= commands, used - commands


def test_every_config_field_has_help() -> None:
    tree = ast.parse((PACKAGE / "config" / "engine_config.py").read_text())
    for cls in (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith("Config")):
        for here, following in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(here, ast.AnnAssign) and cls.name != "EngineConfig":
                is_help = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert is_help, f"{cls.name}.{ast.unparse(here.target)} has no help text under it"
