"""A device with a memory of its own, on the host: the real driver code over a driver that counts.

Tensors are host tensors, so everything runs; what a card would hold is told by numbers.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from graphrunner.device import registry, virtual_memory
from graphrunner.device.cpu import CpuDevice
from graphrunner.device.cuda_driver import CudaDriver
from graphrunner.device.memory_range import FixedRange, MemoryRange
from graphrunner.weights import offload

DEVICE_INDEX = 3
GRANULE_BYTES = 1 << 16
MIB = 1 << 20
_SOURCE = Path(__file__).with_name("fake_cuda_driver.c")


def build_driver() -> str:
    """Path of the compiled driver. A copy of its own for every call: it keeps its counts in the library."""
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    folder = Path(tempfile.mkdtemp(prefix=f"fake_cuda_{digest}_"))
    library = folder / "libfake_cuda.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-o", str(library), str(_SOURCE)], check=True)
    return str(library)


class FakeAccelerator(CpuDevice):
    """A card of `total_bytes` on which others use `other_bytes`.

    Attributes:
        graph_bytes: what recordings take, for tests to set.
        step_bytes: what the largest step takes on top.
        most_used_bytes: the most that was ever in use together, a running largest step included.
    """

    has_own_memory = True

    def __init__(self, total_bytes: int, other_bytes: int = 0, *, has_virtual_memory: bool = True) -> None:
        super().__init__()
        self.has_virtual_memory = has_virtual_memory
        library = build_driver()
        self.driver = CudaDriver(library, DEVICE_INDEX)
        self._counts = ctypes.CDLL(library)
        self._counts.fake_used.restype = self._counts.fake_reserved.restype = ctypes.c_size_t
        self._counts.fake_set_limit.argtypes = (ctypes.c_size_t,)
        self._total_bytes, self.other_bytes = total_bytes, other_bytes
        self.graph_bytes = self.step_bytes = self.fixed_bytes = 0

    def total_bytes(self) -> int:
        return self._total_bytes

    def page_bytes(self) -> int:
        """Memory behind the ranges."""
        return self._counts.fake_used() + self.fixed_bytes

    def reserved_range_bytes(self) -> int:
        """Addresses."""
        return self._counts.fake_reserved()

    def set_limit(self, num_bytes: int) -> None:
        """The driver has no more than this for ranges."""
        self._counts.fake_set_limit(num_bytes)

    def used_bytes(self) -> int:
        return self.other_bytes + self.graph_bytes + self.page_bytes()

    def free_bytes(self) -> int:
        return self._total_bytes - self.used_bytes()

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return self.step_bytes

    def memory_range(self, num_bytes: int) -> MemoryRange:
        if self.has_virtual_memory:
            return virtual_memory.VirtualRange(self.driver, num_bytes, self.torch_device)
        self.fixed_bytes += num_bytes
        return FixedRange(num_bytes, self.torch_device)


def host_tensor_at(address: int, num_bytes: int, device: torch.device, owner: object = None) -> torch.Tensor:
    """`virtual_memory.tensor_at` for the host."""
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    memory.owner = owner
    return torch.frombuffer(memory, dtype=torch.uint8)


def install(monkeypatch: pytest.MonkeyPatch, accelerator: FakeAccelerator) -> FakeAccelerator:
    """Let the host be this device: its tensors are moved to the host as a card's are."""
    monkeypatch.setattr(offload, "_is_on_host", lambda device: False)
    monkeypatch.setattr(virtual_memory, "tensor_at", host_tensor_at)
    monkeypatch.setattr(registry, "_cpu_device", lambda: accelerator)
    return accelerator
