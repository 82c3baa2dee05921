"""What backends share that record into one memory pool: warm-ups, the pool's life, recordings by key.

Note [warm-ups]. The first call of a forward may do what no recording can hold: load a kernel, make a library's
workspace. A backend's first key brings nearly all of that, so it alone is warmed up beforehand. Any other is recorded
at once; where that breaks, what it lacked is its own: it is warmed up then, and recorded anew. What must exist before
a recording but would not break one, as a counter that starts at zero, has to refuse to be made inside of one.
"""

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
    CaptureStats,
    ExecutionBackend,
    Forward,
    capture_error,
    recording_scope,
)
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)


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
    """Records forwards into a pool that is held for as long as any recording lives.

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
        """See `ExecutionBackend.capture_one` and Note [warm-ups]."""
        device, start_s, reserved = self._device, time.perf_counter(), self._device.reserved_bytes()
        self._drop(key)
        try:
            if not self._recordings:
                self._warm_up(forward, reset, NUM_FIRST_WARMUPS)
                recorded = self._record(forward)
            else:
                recorded = self._record_at_once(key, forward, reset)
        except Exception as cause:
            raise capture_error(key, cause) from cause
        self._recordings[key] = recorded
        memory_bytes = max(0, device.reserved_bytes() - reserved)
        return CaptureStats(recorded[0].num_nodes(), (time.perf_counter() - start_s) * 1e3, memory_bytes)

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

    def _record_at_once(
        self, key: ShapeKey, forward: Forward, reset: Callable[[], None] | None
    ) -> tuple[Recording, ModelOutput]:
        try:
            return self._record(forward)
        except Exception as cause:
            log.debug("%s: warmed up and recorded again after %s: %s", key, type(cause).__name__, cause)
        # Out of the handler: the error's frames hold what the broken recording allocated.
        if reset is not None:
            reset()
        self._warm_up(forward, reset, 1)
        return self._record(forward)

    def _warm_up(self, forward: Forward, reset: Callable[[], None] | None, count: int) -> None:
        for _ in range(count):
            forward()
            if reset is not None:
                reset()
        self._device.synchronize()

    def _record(self, forward: Forward) -> tuple[Recording, ModelOutput]:
        """One recording; one that breaks gives back what it took."""
        recording = self._new_recording()
        try:
            return recording, recording.record(forward)
        except BaseException:
            recording.release()
            raise

    def _drop(self, key: ShapeKey) -> None:
        entry = self._recordings.pop(key, None)
        if entry is not None:
            entry[0].release()
