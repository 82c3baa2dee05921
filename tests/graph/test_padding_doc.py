import re
from pathlib import Path

import torch

from graphrunner.runner.static_buffers import LOADED_BUFFERS, Pad

DOC = Path(__file__).resolve().parents[2] / "docs" / "padding.md"


def test_the_page_is_the_table() -> None:
    rows = [tuple(cell.strip() for cell in line.strip("|\n").split("|")) for line in DOC.read_text().splitlines()
            if re.match(r"\| \w+ \| int", line)]  # fmt: skip
    code = [
        (
            spec.name,
            str(spec.dtype).removeprefix("torch."),
            spec.axis.value,
            spec.pad.value if isinstance(spec.pad, Pad) else str(spec.pad),
            spec.why_pad_is_safe,
        )
        for spec in LOADED_BUFFERS
    ]
    assert rows == code
    assert all(spec.dtype in (torch.int32, torch.int64) for spec in LOADED_BUFFERS)
