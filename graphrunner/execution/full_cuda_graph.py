"""One device graph a key, all in one memory pool that is held for as long as any of them lives.

On the CPU the same code runs on tapes (`graphrunner/device/tape_graph.py`), which keep a graph's rules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace

from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ShapeKey
from graphrunner.device.device import Device, DeviceGraph, GraphPool, Stream
from graphrunner.execution.backend import (
    NUM_WARMUPS,
    CaptureStats,
    ExecutionBackend,
    Forward,
    capture_error,
    frozen_gc,
)


class FullCudaGraphBackend(ExecutionBackend):
    """Records the whole forward. A replay is one launch, whatever its size.

    Args:
        device: where to record.
        pool: where graphs take their memory; backends that never replay at the same time may share one. None makes
            a pool of its own.
    """

    name = "full"

    def __init__(self, device: Device, pool: GraphPool | None = None) -> None:
        self._device = device
        self._pool = pool if pool is not None else device.graph_pool()
        self._graphs: dict[ShapeKey, tuple[DeviceGraph, ModelOutput]] = {}

    @contextmanager
    def capture_session(self, stream: Stream | None = None) -> Iterator[None]:
        """No garbage collection, the capture stream current, the device idle before and after."""
        self._device.synchronize()
        with frozen_gc(), self._device.capture_scope(stream):
            yield
        self._device.synchronize()

    def capture_one(self, key: ShapeKey, forward: Forward, reset: Callable[[], None] | None = None) -> CaptureStats:
        """See `ExecutionBackend.capture_one`."""
        device, start_s, reserved = self._device, time.perf_counter(), self._device.reserved_bytes()
        self._drop(key)
        graph = self._pool.new_graph()
        try:
            for _ in range(NUM_WARMUPS):
                forward()
                if reset is not None:
                    reset()
            device.synchronize()
            graph.begin()
            output = forward()
            graph.end()
        except Exception as cause:
            graph.release()
            raise capture_error(key, cause) from cause
        # Their memory is the pool's, and what the next recording takes: keys never run at the same time.
        self._graphs[key] = (graph, _unowned(output, device))
        memory_bytes = max(0, device.reserved_bytes() - reserved)
        return CaptureStats(graph.num_nodes(), (time.perf_counter() - start_s) * 1e3, memory_bytes)

    def can_run(self, key: ShapeKey) -> bool:
        """See `ExecutionBackend.can_run`."""
        return key in self._graphs

    def replay_session(self) -> AbstractContextManager[None]:
        """Nothing to set up: graphs replay on the current stream."""
        return nullcontext()

    def replay(self, key: ShapeKey) -> ModelOutput:
        """One graph launch. Sync: none."""
        graph, output = self._graphs[key]
        graph.replay()
        return output

    def close(self) -> None:
        """Drop every graph; their memory returns to the allocator."""
        for key in list(self._graphs):
            self._drop(key)
        self._pool.release()

    def _drop(self, key: ShapeKey) -> None:
        entry = self._graphs.pop(key, None)
        if entry is not None:
            entry[0].release()


def _unowned(output: ModelOutput, device: Device) -> ModelOutput:
    tensors = {field.name: getattr(output, field.name) for field in fields(output)}
    return replace(output, **{name: device.unowned(tensor) for name, tensor in tensors.items() if tensor is not None})
