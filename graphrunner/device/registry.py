"""From a torch device to ours."""

from __future__ import annotations

from functools import cache

import torch

from graphrunner.device.cpu import CpuDevice
from graphrunner.device.device import Device


def device_of(torch_device: torch.device) -> Device:
    """The one object of a device; anything that is not CUDA is treated as the host."""
    if torch_device.type == "cuda":
        index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
        return _cuda_device(index)
    return _cpu_device()


@cache
def _cpu_device() -> Device:
    return CpuDevice()


@cache
def _cuda_device(index: int) -> Device:
    from graphrunner.device.cuda import CudaDevice

    return CudaDevice(torch.device("cuda", index))
