"""The host as a device: work is done when the call returns, and graphs are tapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from graphrunner.device.device import Device, DeviceKind, Fence, GraphPool, Stream
from graphrunner.device.memory_range import HostRange, MemoryRange
from graphrunner.device.tape_graph import TapePool


class _NoFence(Fence):
    def record(self) -> None:
        """Nothing is ever in flight."""

    def wait(self) -> None:
        """Nothing is ever in flight."""


class CpuDevice(Device):
    """See `Device`. Tensors are host memory: loaders write into them in place."""

    kind = DeviceKind.CPU
    has_own_memory = False
    has_virtual_memory = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def synchronize(self) -> None:
        """See `Device.synchronize`."""

    def free_bytes(self) -> int:
        """See `Device.free_bytes`."""
        return int(psutil.virtual_memory().available)

    def total_bytes(self) -> int:
        """See `Device.total_bytes`."""
        return int(psutil.virtual_memory().total)

    def reserved_bytes(self) -> int:
        """See `Device.reserved_bytes`."""
        return 0

    def used_bytes(self) -> int:
        """See `Device.used_bytes`."""
        return int(psutil.Process().memory_info().rss)

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """See `Device.peak_bytes`."""
        work()
        return 0

    def trim(self) -> None:
        """See `Device.trim`."""

    def memory_range(self, num_bytes: int) -> MemoryRange:
        """See `Device.memory_range`."""
        return HostRange(num_bytes)

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Device.unowned`."""
        return tensor

    def fence(self) -> Fence:
        """See `Device.fence`."""
        return _NoFence()

    def host_block(self, num_bytes: int) -> torch.Tensor:
        """See `Device.host_block`."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    @contextmanager
    def capture_scope(self, stream: Stream | None) -> Iterator[None]:
        """See `Device.capture_scope`."""
        yield

    def graph_pool(self) -> GraphPool:
        """See `Device.graph_pool`."""
        return TapePool()
