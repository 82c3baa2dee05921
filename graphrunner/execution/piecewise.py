"""A forward compiled piece by piece, cut at attention; on a device each piece is then recorded as a graph.

What is compiled are torch operators: a foreign model's own, or the formulas that stand in for the GPU's kernels of a
native one (`graphrunner.kernels.tracing`). The compiler joins the small ones; products stay the library's. Attention
runs between the pieces, with the kernels that it has everywhere. Equal layers are one compilation, and artefacts are
kept on disk. A forward that has other things in it than operators fails its check at capture, is reported and served
eagerly. See docs/decisions/0006-what-a-compiler-is-given.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from graphrunner.core.active_batch import current_batch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ShapeKey
from graphrunner.device.device import Device, GraphPool, Stream
from graphrunner.execution.artifact_cache import ArtifactCache
from graphrunner.execution.backend import CaptureStats, ExecutionBackend, Forward, capture_error, recording_scope
from graphrunner.execution.compiled_steps import (
    BreakMemory,
    CompiledBreak,
    CompiledPiece,
    CompiledSteps,
    RecordedPiece,
    apart,
)
from graphrunner.execution.split import Break, Piece, SplitForward, split_forward
from graphrunner.execution.traced import TracedForward, check_equal
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)


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
        self._break_memory = BreakMemory()
        self._recordings: dict[ShapeKey, CompiledSteps] = {}

    @contextmanager
    def capture_session(self, stream: Stream | None = None) -> Iterator[None]:
        """See `recording_scope`; then says how much was compiled."""
        with recording_scope(self._device, stream):
            yield
        log.info("piecewise: compiled %d, from cache %d", self.cache.num_compiled, self.cache.num_from_cache)

    def capture_one(self, key: ShapeKey, forward: Forward, reset: Callable[[], None] | None = None) -> CaptureStats:
        """Trace, cut, find or compile each piece, record it; compare one run with the same operators one by one."""
        start_s, reserved, num_compiled = time.perf_counter(), self._device.reserved_bytes(), self.cache.num_compiled
        self._drop(key)
        recording = CompiledSteps()
        try:
            split = split_forward(forward)
            self._record(split, recording)
            expected = recording.pretended(forward)
            if reset is not None:
                reset()
            check_equal(expected, recording.pretend(), is_half=recording.is_half)
            if reset is not None:
                reset()
        except Exception as cause:
            recording.release()
            raise capture_error(key, cause) from cause
        self._recordings[key] = recording
        made = self.cache.num_compiled - num_compiled
        num_operators = sum(node.op == "call_function" for node in split.traced.module.graph.nodes)
        return CaptureStats(
            num_nodes=recording.num_graph_nodes() or num_operators,
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
        self._break_memory.clear()
        self.cache.clear()
        self._pool.release()

    def _record(self, split: SplitForward, recording: CompiledSteps) -> None:
        """Fill `recording`, running each step once. A value's memory is free for later steps after its last use."""
        device, last_uses = self._device, split.last_uses()
        values = dict(split.values)
        recording.held = tuple(values.values())
        for index, step in enumerate(split.steps):
            if isinstance(step, Break):
                argument = values[step.argument]
                output = self._break_memory.place(
                    step.call(step.batch, argument), is_brief=split.is_brief(index, last_uses)
                )
                recording.steps.append(CompiledBreak(step, device.unowned(argument), output))
                values[step.output] = output
            else:
                compiled, outputs = self._compile(step, tuple(values[name] for name in step.inputs))
                recording.steps.append(compiled)
                values |= dict(zip(step.outputs, outputs, strict=True))
                del outputs
            values = {name: value for name, value in values.items() if last_uses.get(name, -1) > index}
        recording.output = split.traced.output([device.unowned(values[name]) for name in split.results])

    def _compile(
        self, piece: Piece, inputs: tuple[Tensor, ...]
    ) -> tuple[CompiledPiece | RecordedPiece, tuple[Tensor, ...]]:
        """The piece and what it gives for `inputs`. Raises whatever the compiler or the device does."""
        artifact, _ = self.cache.get(TracedForward(piece.module, inputs, ()))
        outputs = apart(artifact(*inputs), inputs)
        if not self._device.has_own_memory:
            return CompiledPiece(artifact, inputs, outputs), outputs
        self._device.synchronize()
        graph = self._pool.new_graph()
        try:
            graph.begin()
            outputs = apart(artifact(*inputs), inputs)
            graph.end()
        except Exception:
            graph.release()
            raise
        graph.replay()  # what follows must find values, not what the memory held before
        return RecordedPiece(graph), outputs

    def _drop(self, key: ShapeKey) -> None:
        recording = self._recordings.pop(key, None)
        if recording is not None:
            recording.release()
