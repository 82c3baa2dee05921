"""What backends share that record into one memory pool: warm-ups, the pool's life, recordings by key."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ShapeKey
from graphrunner.device.device import Device, GraphPool, Stream
from graphrunner.execution.backend import (
    NUM_FIRST_WARMUPS,
    NUM_WARMUPS,
    CaptureStats,
    ExecutionBackend,
    Forward,
    capture_error,
    recording_scope,
)


class Recording(Protocol):
    """One key's recording."""

    def record(self, forward: Forward) -> ModelOutput:
        """Run `forward` once, recording it; what a replay writes into."""
        ...

    def replay(self) -> None:
        """Run what was recorded."""
        ...

    def num_nodes(self) -> int:
        """Kernels that a replay launches."""
        ...

    def release(self) -> None:
        """Give its graphs back. Idempotent, also after a recording that broke."""
        ...


class PooledBackend(ExecutionBackend):
    """Records a forward after its warm-ups, into a pool that is held for as long as any recording lives.

    Args:
        device: where to record.
        pool: where graphs take their memory; backends that never replay at the same time may share one. None makes
            a pool of its own.
    """

    def __init__(self, device: Device, pool: GraphPool | None = None) -> None:
        self._device = device
        self._pool = pool if pool is not None else device.graph_pool()
        self._recordings: dict[ShapeKey, tuple[Recording, ModelOutput]] = {}

    @abstractmethod
    def _new_recording(self) -> Recording:
        """An empty recording on the pool."""

    def capture_session(self, stream: Stream | None = None) -> AbstractContextManager[None]:
        """See `recording_scope`."""
        return recording_scope(self._device, stream)

    def capture_one(self, key: ShapeKey, forward: Forward, reset: Callable[[], None] | None = None) -> CaptureStats:
        """See `ExecutionBackend.capture_one`."""
        device, start_s, reserved = self._device, time.perf_counter(), self._device.reserved_bytes()
        self._drop(key)
        recording = self._new_recording()
        try:
            for _ in range(NUM_WARMUPS if self._recordings else NUM_FIRST_WARMUPS):
                forward()
                if reset is not None:
                    reset()
            device.synchronize()
            output = recording.record(forward)
        except Exception as cause:
            recording.release()
            raise capture_error(key, cause) from cause
        self._recordings[key] = (recording, output)
        memory_bytes = max(0, device.reserved_bytes() - reserved)
        return CaptureStats(recording.num_nodes(), (time.perf_counter() - start_s) * 1e3, memory_bytes)

    def can_run(self, key: ShapeKey) -> bool:
        """See `ExecutionBackend.can_run`."""
        return key in self._recordings

    def replay_session(self) -> AbstractContextManager[None]:
        """Nothing to set up: graphs replay on the current stream."""
        return nullcontext()

    def replay(self, key: ShapeKey) -> ModelOutput:
        """Launch what was recorded. Sync: none of its own."""
        recording, output = self._recordings[key]
        recording.replay()
        return output

    def close(self) -> None:
        """Drop every recording; their memory returns to the allocator. Idempotent."""
        for key in list(self._recordings):
            self._drop(key)
        self._pool.release()

    def _drop(self, key: ShapeKey) -> None:
        entry = self._recordings.pop(key, None)
        if entry is not None:
            entry[0].release()
