"""Set before anything imports triton: without a GPU its kernels run under the interpreter."""

import os
from importlib.util import find_spec

# Read when torch is loaded. Workers share the cores: a thread that waits for another must not hold the core it needs.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import pytest
import torch

# A machine with a GPU may have only what the engine itself needs; CI has everything.
_NEEDED_BY = {
    "server": ("fastapi", "openai"),
    "benchmarks/test_performance_page.py": ("matplotlib",),
    "anomaly": ("fastapi", "zmq", "msgspec"),
    "policy": ("fastapi", "pydantic"),
    "unit/weights/test_embedded_model.py": ("gguf",),
    "unit/weights/test_gguf.py": ("gguf",),
    "unit/weights/test_sources.py": ("gguf",),
}
collect_ignore = [path for path, names in _NEEDED_BY.items() if any(find_spec(name) is None for name in names)]
assert not (os.environ.get("CI") and collect_ignore), f"not collected for want of a package: {collect_ignore}"

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
