"""What importing the package puts into the environment, and what it leaves alone."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
    ids=["default", "spin-count", "wait-policy"],
)
def test_threads_spin_shortly_unless_told(given: dict[str, str], expected: str) -> None:
    program = "import graphrunner, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    run = subprocess.run(
        [sys.executable, "-c", program], env=clean | given, capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.split() == [expected, "False"]
