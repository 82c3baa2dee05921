"""Whether the weights fit before any of them is read."""

from __future__ import annotations

import torch

from graphrunner.core.errors import ModelLoadError

_GIB = 1 << 30


def available_bytes(device: torch.device) -> int:
    """Bytes that a new allocation on this device can have now."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes)
    import psutil

    return int(psutil.virtual_memory().available)


def check_fits(name: str, num_bytes: int, numbers: str, device: torch.device, free_bytes: int | None = None) -> None:
    """Refuse a model whose weights alone are larger than the free memory.

    Args:
        num_bytes: of all weights on the device.
        numbers: what they are kept in, for the message.
        free_bytes: overrides the measurement.

    Raises:
        ModelLoadError: with both sizes.
    """
    free_bytes = available_bytes(device) if free_bytes is None else free_bytes
    if num_bytes > free_bytes:
        raise ModelLoadError(
            f"{name}: the weights need {num_bytes / _GIB:.2f} GiB in {numbers}, "
            f"{device} has {free_bytes / _GIB:.2f} GiB free; use a smaller model, dtype or quantization"
        )
