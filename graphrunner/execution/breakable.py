"""A forward recorded in segments, with Python between them at attention. No compiler, nothing patched.

For attention that must look at the step on the host (its plan changes with the lengths), and for finding out which
half of a forward a graph breaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphrunner.core.active_batch import current_batch
from graphrunner.core.outputs import ModelOutput
from graphrunner.device.device import DeviceGraph, GraphPool
from graphrunner.device.graph import BreakCall, listening
from graphrunner.execution.backend import (
    Forward,
    batch_at_break,
)
from graphrunner.execution.pooled_backend import PooledBackend

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


class BreakableBackend(PooledBackend):
    """See the module. A replay is as many launches as segments, and the breaks' own."""

    name = "breakable"
    has_eager_breaks = True

    def _new_recording(self) -> SegmentedRecording:
        return SegmentedRecording(self._pool)
