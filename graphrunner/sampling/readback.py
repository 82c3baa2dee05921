"""Token ids on the way to the host, through memory that is used again and again."""

from __future__ import annotations

import torch

from graphrunner.device.device import Device, Fence
from graphrunner.device.registry import device_of

_MIN_TOKENS = 64


class TokenReadback:
    """Starts copies of token ids to the host, each two calls: the copy, and a fence behind it.

    Memory that the device may copy into, and a fence, cost more to make than such a copy takes. A place is used again
    once its tokens were read; one whose tokens nobody reads goes with its copy.

    Args:
        device: where token ids come from.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._free: list[_Place] = []

    def start(self, token_ids: torch.Tensor) -> TokenCopy:
        """Copy int32 ids of any shape. Sync: none.

        Aliasing: the source may be overwritten by whatever is sent to the device from here on.
        """
        if not self._device.has_own_memory:
            return TokenCopy(token_ids.clone(), None, self._free)
        num_tokens = token_ids.numel()
        place = self._free.pop() if self._free else None
        if place is None or place.num_tokens < num_tokens:
            place = _Place(max(_MIN_TOKENS, 1 << (num_tokens - 1).bit_length()), self._device)
        host = place.view(token_ids.shape)
        host.copy_(token_ids, non_blocking=True)
        place.fence.record()
        return TokenCopy(host, place, self._free)


class TokenCopy:
    """One copy, to be read once: the place then serves the next one."""

    __slots__ = ("_free", "_host", "_place")

    def __init__(self, host: torch.Tensor, place: _Place | None, free: list[_Place]) -> None:
        self._host, self._place, self._free = host, place, free

    def read(self) -> list:
        """The ids as nested lists. Sync: waits for the copy."""
        place = self._place
        if place is None:
            return self._host.tolist()
        place.fence.wait()
        ids = self._host.tolist()
        self._free.append(place)
        return ids


class _Place:
    """Host memory for int32 [num_tokens], and its fence."""

    def __init__(self, num_tokens: int, device: Device) -> None:
        self.num_tokens = num_tokens
        self.fence: Fence = device.fence()
        self._block = device.host_block(4 * num_tokens).view(torch.int32)
        self._views: dict[torch.Size, torch.Tensor] = {}

    def view(self, shape: torch.Size) -> torch.Tensor:
        """The first entries, in that shape."""
        view = self._views.get(shape)
        if view is None:
            view = self._views[shape] = self._block[: shape.numel()].view(shape)
        return view
