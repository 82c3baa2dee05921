"""Which attention backend a device gets. A new one is one entry here."""

from __future__ import annotations

from enum import Enum

import torch

from graphrunner.attention.backend import AttentionBackend
from graphrunner.attention.torch_attention import TorchAttention
from graphrunner.core.errors import ConfigError


class AttentionName(Enum):
    """Backends by the name a user gives; AUTO follows the device."""

    AUTO = "auto"
    TORCH = "torch"
    CPU = "cpu"
    TRITON = "triton"
    FLASHINFER = "flashinfer"


_BY_DEVICE = {"cpu": AttentionName.CPU, "cuda": AttentionName.TRITON}


def create_attention(
    device: torch.device, name: AttentionName = AttentionName.AUTO, *, is_batch_invariant: bool = False
) -> AttentionBackend:
    """The backend called `name`, or the one for `device`; its libraries are imported now and not before.

    Raises:
        ConfigError: the backend cannot run on the device, or its package is not installed.
    """
    if name is AttentionName.AUTO:
        name = _BY_DEVICE.get(device.type, AttentionName.TORCH)
    if name is AttentionName.TORCH:
        return TorchAttention()
    if name is AttentionName.CPU:
        _require_device(name, device, "cpu")
        from graphrunner.attention.cpu_attention import CpuAttention

        return CpuAttention(is_batch_invariant)
    _require_device(name, device, "cuda")
    if name is AttentionName.TRITON:
        from graphrunner.attention.triton_attention import TritonAttention

        return TritonAttention(is_batch_invariant)
    from graphrunner.attention.flashinfer_attention import FlashInferAttention

    try:
        return FlashInferAttention(device)
    except ImportError:
        problem = "needs flashinfer: pip install graphrunner[flashinfer]"
        raise ConfigError("attention", name.value, problem) from None


def _require_device(name: AttentionName, device: torch.device, device_type: str) -> None:
    if device.type != device_type:
        raise ConfigError("attention", name.value, f"runs on {device_type}, not on {device.type}")
