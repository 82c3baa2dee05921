"""From the name a user gives to an execution backend. A new one is one entry here; its module is imported only then."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

import torch

from graphrunner.config.engine_config import GraphBackend
from graphrunner.core.errors import ConfigError
from graphrunner.device.device import GraphPool
from graphrunner.device.registry import device_of
from graphrunner.execution.backend import ExecutionBackend

_RECORDS_DEVICE_GRAPHS: Mapping[GraphBackend, tuple[str, str]] = MappingProxyType(
    {
        GraphBackend.FULL: ("full_cuda_graph", "FullCudaGraphBackend"),
        GraphBackend.BREAKABLE: ("breakable", "BreakableBackend"),
        GraphBackend.PIECEWISE: ("piecewise", "PiecewiseBackend"),
    }
)
"""Built with a device and a pool for its graphs."""


def create_execution_backend(
    wanted: GraphBackend, device: torch.device, *, pool: GraphPool | None = None
) -> ExecutionBackend:
    """The backend called `wanted`.

    Args:
        pool: memory that several backends' graphs share; None gives each its own.

    Raises:
        ConfigError: it does not exist on the device. AUTO and OFF are decisions, not backends.
    """
    if wanted is GraphBackend.RECORDING:
        from graphrunner.execution.recording import RecordingBackend

        return RecordingBackend()
    if wanted is GraphBackend.INDUCTOR:
        if device.type != "cpu":
            raise ConfigError("decode_graph/prefill_graph", wanted.value, f"runs on cpu, not on {device.type}")
        from graphrunner.execution.inductor import InductorBackend

        return InductorBackend()
    if wanted not in _RECORDS_DEVICE_GRAPHS:
        raise ConfigError("decode_graph/prefill_graph", wanted.value, "is not an execution backend")
    module, name = _RECORDS_DEVICE_GRAPHS[wanted]
    backend = getattr(import_module(f"graphrunner.execution.{module}"), name)
    return backend(device_of(device), pool)
