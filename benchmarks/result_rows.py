"""One measured figure a row, and the JSON file that rows are kept in."""

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from marks import mark_of

HIGHER_IS_BETTER = {"tokens/s", "x", "TB/s", "TFLOP/s"}
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Row:
    """A figure beside what bounds it and what is asked of it.

    Attributes:
        name: "kind/shape/detail", the key of the file.
        floor: the best value that memory and arithmetic allow, from this run's own ceilings; None where not computed.
        must, aim: the marks of the speed table; None where it sets none.
        commit: the code that was measured.
    """

    name: str
    value: float
    unit: str
    floor: float | None = None
    must: float | None = None
    aim: float | None = None
    commit: str = "unknown"

    @classmethod
    def of(cls, name: str, value: float, unit: str, floor: float | None = None) -> "Row":
        """A row with the marks of its name."""
        mark = mark_of(name)
        return cls(name, _short(value), unit, None if floor is None else _short(floor), mark.must, mark.aim)

    @property
    def verdict(self) -> str:
        """aim, pass, fall short, or nothing where nothing is asked."""
        if self.must is None:
            return ""
        if self._reaches(self.must):
            return "aim" if self.aim is not None and self._reaches(self.aim) else "pass"
        return "fall short"

    @property
    def floor_share(self) -> float | None:
        """How much of the possible is reached, 0 to 1."""
        if not self.floor or not self.value:
            return None
        return self.value / self.floor if self.unit in HIGHER_IS_BETTER else self.floor / self.value

    def __str__(self) -> str:
        cells = [_cell(each) for each in (self.value, self.floor, self.must, self.aim)]
        share = f"{self.floor_share:.0%}" if self.floor_share else ""
        value, floor, must, aim = cells
        return (
            f"{self.name:30s} {value:>9s} {self.unit:8s} floor {floor:>8s} {share:>4s} "
            f"must {must:>8s} aim {aim:>8s} {self.verdict}"
        )

    def _reaches(self, limit: float) -> bool:
        return self.value >= limit if self.unit in HIGHER_IS_BETTER else self.value <= limit


def load_rows(path: Path) -> list[Row]:
    """The rows of a file, none when it is not there."""
    return [Row(**each) for each in json.loads(path.read_text())] if path.exists() else []


def save_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write one row a line, so that a change of one figure is a change of one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(" " + json.dumps(asdict(row)) for row in sorted(rows, key=lambda row: sort_key(row.name)))
    _replace(path, f"[\n{lines}\n]\n")


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """All rows; of the same name the new one."""
    return list({row.name: row for row in (*old, *new)}.values())


def save_json(path: Path, value: object) -> None:
    """Write any JSON value, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, json.dumps(value, indent=1) + "\n")


def sort_key(name: str) -> tuple:
    """Numbers inside names sort as numbers."""
    parts: list[str] = []
    for char in name:
        if parts and parts[-1][-1].isdigit() and char.isdigit():
            parts[-1] += char
        else:
            parts.append(char)
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts)


def current_commit() -> str:
    """The short hash of the checkout, with a mark when files differ from it; "unknown" outside of one."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        command = ["git", "status", "--porcelain", "--", "graphrunner", "benchmarks"]
        changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


class RowSink:
    """Takes rows as they are measured: printed at once, and appended to a file that outlives a crash.

    Args:
        path: JSON lines, each {"row": ...}, {"task": name} or {"profile": {...}}; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def task(self, name: str) -> None:
        """A task begins: what follows is its own, and so is its failure."""
        print(f"-- {name}", flush=True)
        self._append({"task": name})

    def row(self, row: Row) -> None:
        """A figure is there."""
        print(row, flush=True)
        self._append({"row": asdict(row)})

    def profile(self, name: str, value: object) -> None:
        """A breakdown behind a figure."""
        self._append({"profile": {name: value}})

    def _append(self, item: dict) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(item) + "\n")


def _short(value: float) -> float:
    """Five significant digits, which is more than a repeated run keeps."""
    return float(f"{value:.5g}")


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)
