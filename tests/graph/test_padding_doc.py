"""docs/padding.md is the table in the code."""

import re
from pathlib import Path

from graphrunner.runner.gather_rows import DERIVED_WHY_SAFE
from graphrunner.runner.static_buffers import (
    DECODE_BUFFERS,
    HOST_BUFFERS,
    TOKEN_BUFFERS,
    VERIFY_BUFFERS,
    BufferSpec,
    Pad,
)

DOC = Path(__file__).resolve().parents[2] / "docs" / "padding.md"


def rows_under(title: str) -> list[tuple[str, ...]]:
    section = DOC.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| \w+ \|", line) and "buffer" not in line[:9]]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def row_of(spec: BufferSpec) -> tuple[str, ...]:
    pad = spec.pad.value if isinstance(spec.pad, Pad) else str(spec.pad)
    return (spec.name, str(spec.dtype).removeprefix("torch."), spec.axis.value, pad, spec.why_pad_is_safe)


def test_loaded_buffers() -> None:
    assert rows_under("Loaded for prefill, mixed and eager steps") == [row_of(spec) for spec in TOKEN_BUFFERS]
    assert rows_under("Loaded for decode steps") == [row_of(spec) for spec in DECODE_BUFFERS]
    assert rows_under("Loaded for verify steps") == [row_of(spec) for spec in VERIFY_BUFFERS]
    assert rows_under("Loaded on a CPU") == [row_of(spec) for spec in HOST_BUFFERS]


def test_derived_buffers() -> None:
    assert rows_under("Derived on the device, inside the recording") == list(DERIVED_WHY_SAFE.items())
