"""A forward compiled piece by piece, cut at attention; on a device each piece is then recorded as a graph.

For models in plain torch operators (the transformers fallback, for one), whose many small operators the compiler joins.
Equal layers are one compilation, and artefacts are kept on disk. Kernels that are not torch operators cannot be traced:
such a forward (a native model on CUDA) fails its check at capture, is reported and served eagerly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor
from torch._inductor import CompiledArtifact

from graphrunner.core.active_batch import current_batch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ShapeKey
from graphrunner.device.device import Device, DeviceGraph, GraphPool, Stream
from graphrunner.execution.artifact_cache import ArtifactCache
from graphrunner.execution.backend import (
    CaptureStats,
    ExecutionBackend,
    Forward,
    batch_at_break,
    capture_error,
    frozen_gc,
)
from graphrunner.execution.split import Break, Piece, SplitForward, split_forward
from graphrunner.execution.traced import TracedForward, check_equal
from graphrunner.telemetry.log import get_logger

if TYPE_CHECKING:
    from graphrunner.core.forward_batch import ForwardBatch

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _CompiledPiece:
    """A piece and the tensors it keeps its results in; a graph where the device has one."""

    artifact: CompiledArtifact
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    graph: DeviceGraph | None

    def run(self, batch: ForwardBatch) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        for kept, new in zip(self.outputs, self.artifact(*self.inputs), strict=True):
            if kept.data_ptr() != new.data_ptr():
                kept.copy_(new)


@dataclass(frozen=True, slots=True)
class _CompiledBreak:
    step: Break
    argument: Tensor
    output: Tensor

    def run(self, active: ForwardBatch) -> None:
        result = self.step.call(batch_at_break(self.step.batch, active), self.argument)
        if result.data_ptr() != self.output.data_ptr():
            self.output.copy_(result)


@dataclass(slots=True)
class _Recording:
    steps: list[_CompiledPiece | _CompiledBreak] = field(default_factory=list)
    output: ModelOutput = field(default_factory=ModelOutput)

    def replay(self, batch: ForwardBatch) -> ModelOutput:
        for step in self.steps:
            step.run(batch)
        return self.output

    def release(self) -> None:
        for step in self.steps:
            if isinstance(step, _CompiledPiece) and step.graph is not None:
                step.graph.release()
        self.steps.clear()


class PiecewiseBackend(ExecutionBackend):
    """See the module.

    Args:
        device: where to record.
        pool: where graphs take their memory; None makes one.
    """

    name = "piecewise"
    has_eager_breaks = True
    is_traced = True

    def __init__(self, device: Device, pool: GraphPool | None = None) -> None:
        self._device = device
        self._pool = pool if pool is not None else device.graph_pool()
        self.cache = ArtifactCache()
        self._recordings: dict[ShapeKey, _Recording] = {}

    @contextmanager
    def capture_session(self, stream: Stream | None = None) -> Iterator[None]:
        """No garbage collection, the capture stream current, the device idle before and after."""
        self._device.synchronize()
        with frozen_gc(), self._device.capture_scope(stream):
            yield
        self._device.synchronize()
        log.info("piecewise: compiled %d, from cache %d", self.cache.num_compiled, self.cache.num_from_cache)

    def capture_one(self, key: ShapeKey, forward: Forward, reset: Callable[[], None] | None = None) -> CaptureStats:
        """Trace, cut, find or compile each piece, record it; compare one run with the closure's own."""
        start_s, reserved, num_compiled = time.perf_counter(), self._device.reserved_bytes(), self.cache.num_compiled
        self._drop(key)
        recording = _Recording()
        try:
            expected = forward()
            split = split_forward(forward)
            batch = self._record(split, recording)
            if reset is not None:
                reset()
            if batch is not None:
                check_equal(expected, recording.replay(batch))
            if reset is not None:
                reset()
        except Exception as cause:
            recording.release()
            raise capture_error(key, cause) from cause
        self._recordings[key] = recording
        made = self.cache.num_compiled - num_compiled
        return CaptureStats(
            num_nodes=sum(node.op == "call_function" for node in split.traced.module.graph.nodes),
            capture_ms=(time.perf_counter() - start_s) * 1e3,
            memory_bytes=max(0, self._device.reserved_bytes() - reserved),
            is_cached=made == 0,
            num_compiled=made,
        )

    def can_run(self, key: ShapeKey) -> bool:
        """See `ExecutionBackend.can_run`."""
        return key in self._recordings

    def replay_session(self) -> AbstractContextManager[None]:
        """Nothing to set up; the runner has the batch active."""
        return nullcontext()

    def replay(self, key: ShapeKey) -> ModelOutput:
        """Piece, break, piece, ... Sync: whatever the breaks do."""
        return self._recordings[key].replay(current_batch())

    def close(self) -> None:
        """Drop every piece; what is on disk stays. Idempotent."""
        for key in list(self._recordings):
            self._drop(key)
        self._pool.release()

    def _record(self, split: SplitForward, recording: _Recording) -> ForwardBatch | None:
        """Fill `recording`, running each step once; the batch that the breaks were traced with."""
        values, batch = dict(split.values), None
        for step in split.steps:
            if isinstance(step, Break):
                batch = step.batch
                values[step.output] = step.call(batch, values[step.argument])
                recording.steps.append(_CompiledBreak(step, values[step.argument], values[step.output]))
            else:
                compiled = self._compile(step, tuple(values[name] for name in step.inputs))
                recording.steps.append(compiled)
                values |= dict(zip(step.outputs, compiled.outputs, strict=True))
        recording.output = split.traced.output([values[name] for name in split.results])
        return batch

    def _compile(self, piece: Piece, inputs: tuple[Tensor, ...]) -> _CompiledPiece:
        artifact, _ = self.cache.get(TracedForward(piece.module, inputs, ()))
        outputs = tuple(artifact(*inputs))
        if not self._device.has_own_memory:
            return _CompiledPiece(artifact, inputs, outputs, None)
        self._device.synchronize()
        graph = self._pool.new_graph()
        try:
            graph.begin()
            outputs = tuple(artifact(*inputs))
            graph.end()
        except Exception:
            graph.release()
            raise
        graph.replay()  # what follows must find values, not what the memory held before
        return _CompiledPiece(artifact, inputs, outputs, graph)

    def _drop(self, key: ShapeKey) -> None:
        recording = self._recordings.pop(key, None)
        if recording is not None:
            recording.release()
