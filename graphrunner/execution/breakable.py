"""A forward recorded in segments, with Python between them at attention. No compiler, nothing patched.

For attention that must look at the step on the host (its plan changes with the lengths), and for finding out which
half of a forward a graph breaks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphrunner.core.active_batch import current_batch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ShapeKey
from graphrunner.device.device import Device, DeviceGraph, GraphPool, Stream
from graphrunner.device.graph import BreakCall, listening
from graphrunner.execution.backend import (
    NUM_WARMUPS,
    CaptureStats,
    ExecutionBackend,
    Forward,
    batch_at_break,
    capture_error,
    frozen_gc,
)

if TYPE_CHECKING:
    import torch

    from graphrunner.core.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class _Break:
    """Python between two segments, and the tensor in which the next one expects its result."""

    call: BreakCall
    batch: ForwardBatch
    argument: torch.Tensor
    output: torch.Tensor

    def run(self, active: ForwardBatch) -> None:
        result = self.call(batch_at_break(self.batch, active), self.argument)
        if result.data_ptr() != self.output.data_ptr():
            self.output.copy_(result)


class SegmentedRecording:
    """Segments and breaks in the order they ran. Listens to `eager_break` while it records.

    Args:
        pool: where the segments take their memory.
    """

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._segments: list[DeviceGraph] = []
        self._breaks: list[_Break] = []

    def record(self, forward: Forward) -> ModelOutput:
        """Run `forward` once, recording it."""
        self._open()
        with listening(self):
            output = forward()
        self._segments[-1].end()
        return output

    def on_break(self, call: BreakCall, batch: ForwardBatch, tensor: torch.Tensor) -> torch.Tensor:
        """See `BreakListener.on_break`. The output is allocated outside of every graph, so it stays its own."""
        self._segments[-1].end()
        with listening(None):
            output = call(batch, tensor)
        self._breaks.append(_Break(call, batch, tensor, output))
        self._open()
        return output

    def replay(self) -> None:
        """Segment, break, segment, ... Breaks see the batch that is active now."""
        segments, breaks = self._segments, self._breaks
        segments[0].replay()
        if breaks:
            batch = current_batch()
            for each, segment in zip(breaks, segments[1:], strict=True):
                each.run(batch)
                segment.replay()

    def num_nodes(self) -> int:
        """Kernels in all segments together; what breaks launch is not counted."""
        return sum(segment.num_nodes() for segment in self._segments)

    def release(self) -> None:
        """Give the segments back. Idempotent."""
        for segment in self._segments:
            segment.release()
        self._segments, self._breaks = [], []

    def _open(self) -> None:
        segment = self._pool.new_graph()
        self._segments.append(segment)
        segment.begin()


class BreakableBackend(ExecutionBackend):
    """See the module. Args as `FullCudaGraphBackend`."""

    name = "breakable"
    has_eager_breaks = True

    def __init__(self, device: Device, pool: GraphPool | None = None) -> None:
        self._device = device
        self._pool = pool if pool is not None else device.graph_pool()
        self._recordings: dict[ShapeKey, tuple[SegmentedRecording, ModelOutput]] = {}

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
        recording = SegmentedRecording(self._pool)
        try:
            for _ in range(NUM_WARMUPS):
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
        """Nothing to set up; the runner has the batch active."""
        return nullcontext()

    def replay(self, key: ShapeKey) -> ModelOutput:
        """As many launches as segments, and the breaks' own. Sync: whatever the breaks do."""
        recording, output = self._recordings[key]
        recording.replay()
        return output

    def close(self) -> None:
        """Drop every segment. Idempotent."""
        for key in list(self._recordings):
            self._drop(key)
        self._pool.release()

    def _drop(self, key: ShapeKey) -> None:
        entry = self._recordings.pop(key, None)
        if entry is not None:
            entry[0].release()
