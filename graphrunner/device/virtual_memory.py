"""A CUDA device's addresses without memory, and memory put behind them piece by piece."""

from __future__ import annotations

import sys

import torch

from graphrunner.device.cuda_driver import CudaDriver
from graphrunner.device.memory_range import MemoryRange


class _Bytes:
    """Memory as libraries describe it to each other: `__cuda_array_interface__`, version 3."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.owner = owner  # lives as long as a tensor made of this
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_at(address: int, num_bytes: int, device: torch.device, owner: object = None) -> torch.Tensor:
    """uint8 [num_bytes] over memory of the device that somebody else owns. The first byte must be there."""
    return torch.as_tensor(_Bytes(address, num_bytes, owner), device=device)


class VirtualRange(MemoryRange):
    """See `MemoryRange`. The addresses go back when the range and its last tensor are gone.

    Args:
        driver: of the device.
        num_bytes: of addresses; rounded up to whole granules.
        device: for the tensors.
    """

    can_grow = True

    def __init__(self, driver: CudaDriver, num_bytes: int, device: torch.device) -> None:
        self.granularity_bytes = driver.granularity_bytes()
        self.num_bytes = self._rounded(max(num_bytes, 1))
        self._driver = driver
        self._device = device
        self._pieces: list[tuple[int, int]] = []  # (offset, bytes) of each mapping, gapless from the start
        self._address = driver.reserve(self.num_bytes)

    @property
    def committed_bytes(self) -> int:
        """Memory behind the beginning of the range."""
        return sum(num_bytes for _, num_bytes in self._pieces)

    def tensor(self) -> torch.Tensor:
        """See `MemoryRange.tensor`."""
        assert self._pieces, "torch asks the driver whose memory it is, and only memory has an answer"
        return tensor_at(self._address, self.num_bytes, self._device, self)

    def commit(self, num_bytes: int) -> None:
        """See `MemoryRange.commit`."""
        start, end = self.committed_bytes, min(self._rounded(num_bytes), self.num_bytes)
        if end > start:
            self._driver.map(self._address + start, end - start)
            self._pieces.append((start, end - start))
            self.tensor()[start:end].zero_()

    def decommit(self) -> None:
        """See `MemoryRange.decommit`."""
        while self._pieces:
            offset, num_bytes = self._pieces.pop()
            self._driver.unmap(self._address + offset, num_bytes)

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "_address"):
            return  # the process is going, or no address was ever had
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.decommit()
        self._driver.release(self._address, self.num_bytes)

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.granularity_bytes) * self.granularity_bytes
