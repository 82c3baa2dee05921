"""One block of device memory that is filled from the host in one copy."""

from __future__ import annotations

import numpy as np
import torch

from graphrunner.device.registry import device_of

_ALIGNMENT_BYTES = 16
_NUM_HOST_BLOCKS = 2


class StagingBlock:
    """Device bytes, and the host memory from which they are sent.

    Reuse fence: two host blocks take turns, and each carries a fence recorded after its copy; `begin` waits for the
    fence of the block it hands out. So the host never writes memory that an earlier copy may still be reading, and in
    a running engine the wait is over before it starts. On a CPU the host writes into the block itself.

    Args:
        num_bytes: of the block.
        device: where it lives.

    Attributes:
        block: uint8 [num_bytes], device; keeps its address.
        host_views: uint8 [num_bytes] each, the host blocks.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.block = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._device = device_of(device)
        self._is_direct = not self._device.has_own_memory
        count = 0 if self._is_direct else _NUM_HOST_BLOCKS
        self._host_blocks = [self._device.host_block(num_bytes) for _ in range(count)] or [self.block]
        self.host_views: list[np.ndarray] = [host.numpy() for host in self._host_blocks]
        self._fences = [self._device.fence() for _ in self._host_blocks]
        self._turn = 0
        self._heads: dict[tuple[int, int], torch.Tensor] = {}
        self._pieces: dict[tuple[int, int | None], tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self) -> int:
        """Which of `host_views` to write now. What it holds is of no meaning."""
        self._turn = (self._turn + 1) % len(self._host_blocks)
        self._fences[self._turn].wait()
        return self._turn

    def send(self, num_bytes: int | None = None) -> None:
        """Copy the first `num_bytes` (None: all) of what `begin` handed out to the device. Sync: none."""
        if self._is_direct:
            return
        pieces = self._pieces.get((self._turn, num_bytes))
        if pieces is None:
            host = self._host_blocks[self._turn]
            pieces = self._pieces[self._turn, num_bytes] = (self.block[:num_bytes], host[:num_bytes])
        pieces[0].copy_(pieces[1], non_blocking=True)
        self._fences[self._turn].record()

    def send_to(self, target: torch.Tensor) -> None:
        """Copy the first bytes of what `begin` handed out to other memory of a device. Sync: none.

        Args:
            target: uint8 [at most num_bytes], device.
        """
        place = self._turn, target.shape[0]
        head = self._heads.get(place)
        if head is None:
            head = self._heads[place] = self._host_blocks[self._turn][: target.shape[0]]
        target.copy_(head, non_blocking=True)
        self._fences[self._turn].record()


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment of a buffer in a block."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
