"""The speculation benchmark prints and saves what it measured, whatever is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*args: str) -> list[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "speculative.py"), *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=environment)
    return done.stdout.splitlines()


def test_the_parts_that_were_measured_are_on_the_page(tmp_path: Path) -> None:
    file, page = tmp_path / "s.json", tmp_path / "page.md"
    lines = run("--parts", "shape", "--num-tokens", "12", "--json", str(file))
    result = json.loads(file.read_text())
    assert json.loads(lines[-1]) == result
    assert [row["batch"] for row in result["shape"]["rows"]] == [1, 4]
    assert all(row["speedup"] > 0 for row in result["shape"]["rows"])

    page.write_text("Before.\n<!-- figures: begin -->\nold\n<!-- figures: end -->\nAfter.\n")
    run("--from-json", str(file), "--page", str(page), "--plot", str(tmp_path / "s.svg"))
    assert "A tiny shape" in page.read_text() and "old" not in page.read_text()
    assert (tmp_path / "s.svg").exists()


def test_nothing_begins_after_the_time_is_up(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    lines = run("--max-seconds", "0", "--methods", "ngram", "--json", str(file))
    assert "ngram is not run: no time was left" in lines
    assert [row["method"] for row in json.loads(file.read_text())["text"]] == ["plain", "ngram"]
