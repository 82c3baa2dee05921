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


def check_fits(
    name: str, num_values: int, dtype: torch.dtype, device: torch.device, free_bytes: int | None = None
) -> None:
    """Refuse a model whose weights alone are larger than the free memory.

    Args:
        num_values: weights that will be on the device.
        free_bytes: overrides the measurement.

    Raises:
        ModelLoadError: with both sizes.
    """
    needed_bytes = num_values * dtype.itemsize
    free_bytes = available_bytes(device) if free_bytes is None else free_bytes
    if needed_bytes > free_bytes:
        raise ModelLoadError(
            f"{name}: the weights need {needed_bytes / _GIB:.2f} GiB in {str(dtype).removeprefix('torch.')}, "
            f"{device} has {free_bytes / _GIB:.2f} GiB free; use a smaller model or dtype"
        )
