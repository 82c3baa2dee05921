"""These tests compare the C++ kernels with their twins: without a C++ compiler there is nothing to test."""

import pytest

from graphrunner.kernels.cpu import ops


@pytest.fixture(autouse=True, scope="session")
def _kernels() -> None:
    if not ops.is_available():
        pytest.skip("needs a C++ compiler")
