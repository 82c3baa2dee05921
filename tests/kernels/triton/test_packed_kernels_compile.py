"""The packed kernels compile to machine code for real cards; the interpreter accepts what a compiler does not.

In a process of its own, because this one has chosen the interpreter.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a card runs the kernels themselves")
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_packed_kernels_compile(capability: int) -> None:
    script = Path(__file__).with_name("compile_packed.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    ran = subprocess.run(
        [sys.executable, str(script), str(capability)], env=environment, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    kernels = {line.split()[-1] for line in ran.stdout.splitlines()}
    assert {"packed_vector_kernel", "packed_sliced_kernel", "packed_tile_kernel", "finish_kernel"} <= kernels
