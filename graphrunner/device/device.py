"""What a device is, as far as runners and execution backends need one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import TypeAlias

import torch

from graphrunner.device.memory_range import MemoryRange

Stream: TypeAlias = torch.Stream


class DeviceKind(Enum):
    """The value is torch's name of the device type."""

    CPU = "cpu"
    CUDA = "cuda"


class Fence(ABC):
    """Marks a point in the device's work; the host can wait until it is passed."""

    @abstractmethod
    def record(self) -> None:
        """Move the mark to the end of the work queued so far."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until the mark is passed; at once when nothing was recorded."""


class DeviceGraph(ABC):
    """Device work recorded once and launched again and again, on the same addresses."""

    @abstractmethod
    def begin(self) -> None:
        """Start recording what the current thread sends to the device. Nothing may read a value back meanwhile."""

    @abstractmethod
    def end(self) -> None:
        """Stop recording; the graph is ready."""

    @abstractmethod
    def replay(self) -> None:
        """Run the recorded work. Sync: none."""

    @abstractmethod
    def num_nodes(self) -> int:
        """Kernels and copies in it; 0 where the device cannot tell."""

    @abstractmethod
    def release(self) -> None:
        """Give its memory back. Idempotent."""


class GraphPool(ABC):
    """Makes graphs that share one memory pool, and holds the pool: else it would die with its last graph.

    Graphs that never run at the same time may share one; the outputs of one die at a replay of another.
    """

    @abstractmethod
    def new_graph(self) -> DeviceGraph:
        """A graph whose memory comes from this pool."""

    @abstractmethod
    def release(self) -> None:
        """Let go of the pool: its memory returns when its last graph is released. New graphs get a new pool."""


class Device(ABC):
    """One accelerator (or the host) behind the few calls that are not the same everywhere.

    Attributes:
        kind: which.
        torch_device: for tensors.
        has_own_memory: whether the host must copy to reach its tensors.
        has_virtual_memory: whether its memory ranges can grow.
    """

    kind: DeviceKind
    torch_device: torch.device
    has_own_memory: bool
    has_virtual_memory: bool

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all queued work is done."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory nobody holds."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Memory there is."""

    @abstractmethod
    def reserved_bytes(self) -> int:
        """Memory that torch's allocator holds, used or not; 0 where it keeps none."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Memory in use: on the whole card, whoever uses it; on a host, by this process."""

    @abstractmethod
    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Run `work`; how much more than before torch's allocator held at its peak. 0 where it keeps no count."""

    @abstractmethod
    def trim(self) -> None:
        """Give back what the allocator keeps for later."""

    @abstractmethod
    def memory_range(self, num_bytes: int) -> MemoryRange:
        """Addresses for `num_bytes`, without memory where the device can do that."""

    @abstractmethod
    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements without a hold on their memory, for outputs in a graph pool: a later recording may take
        the memory, and graphs that share it never run at the same time. `tensor` itself where graphs are tapes."""

    @abstractmethod
    def fence(self) -> Fence:
        """A new fence on the current stream."""

    @abstractmethod
    def host_block(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] on the host, zeroed, fit for asynchronous copies to this device."""

    @abstractmethod
    def capture_scope(self, stream: Stream | None) -> AbstractContextManager[None]:
        """Make the capture stream current; order it after, and the old stream behind, the work inside."""

    @abstractmethod
    def graph_pool(self) -> GraphPool:
        """A new pool."""
