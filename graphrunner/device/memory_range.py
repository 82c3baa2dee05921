"""Addresses that stay, with memory behind them that comes and goes.

A recorded graph holds addresses. So what graphs read must keep its place, while how much of it there is may be decided
later, and while it may be given back and come again.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from contextlib import suppress

import torch


class MemoryRange(ABC):
    """Reserved addresses. Reading or writing past what is committed is an error the device may not survive.

    Attributes:
        num_bytes: of addresses, at least what was asked for.
        granularity_bytes: memory comes in multiples of this.
        can_grow: whether `commit` may be called with a part of the range; else any commit takes all of it.
    """

    num_bytes: int
    granularity_bytes: int
    can_grow: bool

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """uint8 [num_bytes] over the whole range; something must be committed."""

    @abstractmethod
    def commit(self, num_bytes: int) -> None:
        """Put zeroed memory behind the first `num_bytes`; what is there already stays as it is.

        Raises:
            MemoryError: the device has not that much; what was committed before stays.
        """

    @abstractmethod
    def decommit(self) -> None:
        """Give all memory back. The addresses stay; nobody may use them until the next `commit`, or be using them."""


class HostRange(MemoryRange):
    """Host memory: the system gives zeroed pages as they are first written, and takes them back when told."""

    granularity_bytes = mmap.PAGESIZE
    can_grow = True

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        # A shared mapping, which is Python's default, would live on in the system's page cache when given back.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, self.num_bytes, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self) -> torch.Tensor:
        """See `MemoryRange.tensor`."""
        return self._tensor

    def commit(self, num_bytes: int) -> None:
        """Nothing to do: zeroed memory appears by itself."""

    def decommit(self) -> None:
        """See `MemoryRange.decommit`. What is read afterwards is zero."""
        self._map.madvise(mmap.MADV_DONTNEED)


class FixedRange(MemoryRange):
    """For devices without virtual memory: one ordinary allocation, all or nothing, at a new address each time.

    Args:
        num_bytes: of the allocation.
        device: where.
    """

    granularity_bytes = 1
    can_grow = False

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._storage = self._tensor.untyped_storage()

    def tensor(self) -> torch.Tensor:
        """See `MemoryRange.tensor`. It follows the allocation: views of it find the memory after a new commit."""
        return self._tensor

    def commit(self, num_bytes: int) -> None:
        """See `MemoryRange.commit`. All of it."""
        if self._storage.nbytes() == 0:
            try:
                self._storage.resize_(self.num_bytes)
            except torch.OutOfMemoryError as cause:
                raise MemoryError(f"{self.num_bytes} bytes cannot be allocated") from cause
            self._tensor.zero_()

    def decommit(self) -> None:
        """See `MemoryRange.decommit`."""
        self._storage.resize_(0)
