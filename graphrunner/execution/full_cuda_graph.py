"""One device graph a key, all in one memory pool that is held for as long as any of them lives.

On the CPU the same code runs on tapes (`graphrunner/device/tape_graph.py`), which keep a graph's rules.
"""

from __future__ import annotations

from dataclasses import fields, replace

from graphrunner.core.outputs import ModelOutput
from graphrunner.device.device import Device, GraphPool
from graphrunner.execution.backend import Forward
from graphrunner.execution.pooled_backend import PooledBackend


class WholeRecording:
    """A forward in one graph.

    Its outputs' memory is the pool's, and what the next recording takes: keys never run at the same time.
    """

    def __init__(self, device: Device, pool: GraphPool) -> None:
        self._device = device
        self._graph = pool.new_graph()

    def record(self, forward: Forward) -> ModelOutput:
        """See `Recording.record`."""
        self._graph.begin()
        output = forward()
        self._graph.end()
        return _unowned(output, self._device)

    def replay(self) -> None:
        """One graph launch. Sync: none."""
        self._graph.replay()

    def num_nodes(self) -> int:
        """See `Recording.num_nodes`."""
        return self._graph.num_nodes()

    def release(self) -> None:
        """See `Recording.release`."""
        self._graph.release()


class FullCudaGraphBackend(PooledBackend):
    """Records the whole forward. A replay is one launch, whatever its size."""

    name = "full"

    def _new_recording(self) -> WholeRecording:
        return WholeRecording(self._device, self._pool)


def _unowned(output: ModelOutput, device: Device) -> ModelOutput:
    tensors = {field.name: getattr(output, field.name) for field in fields(output)}
    return replace(output, **{name: device.unowned(tensor) for name, tensor in tensors.items() if tensor is not None})
