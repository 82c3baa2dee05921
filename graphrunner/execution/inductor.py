"""Forwards compiled by Inductor, one static shape a key, kept on disk. For the CPU.

Small operators are fused; the heavy ones are the package's own and stay single nodes, so graphs are small.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch._inductor import CompiledArtifact

from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ShapeKey
from graphrunner.device.device import Stream
from graphrunner.execution.artifact_cache import ArtifactCache
from graphrunner.execution.backend import CaptureStats, ExecutionBackend, Forward, capture_error, frozen_gc
from graphrunner.execution.traced import TracedForward, check_equal, trace_forward
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Compiled:
    traced: TracedForward
    artifact: CompiledArtifact

    def run(self) -> ModelOutput:
        return self.traced.output(self.artifact(*self.traced.inputs))


class InductorBackend(ExecutionBackend):
    """See the module. After its capture a key is never compiled again, whatever the batches.

    Args:
        folder: where artefacts are kept; None is the user's cache.
    """

    name = "inductor"
    is_traced = True

    def __init__(self, folder: Path | None = None) -> None:
        self.cache = ArtifactCache(folder)
        self._compiled: dict[ShapeKey, _Compiled] = {}

    @contextmanager
    def capture_session(self, stream: Stream | None = None) -> Iterator[None]:
        """Say at the end what was compiled and what was found."""
        cache, start_s = self.cache, time.perf_counter()
        before = (cache.num_compiled, cache.num_from_cache)
        with frozen_gc():
            yield
        made, found = cache.num_compiled - before[0], cache.num_from_cache - before[1]
        log.info("inductor: compiled %d, from cache %d, %.1f s", made, found, time.perf_counter() - start_s)

    def capture_one(self, key: ShapeKey, forward: Forward, reset: Callable[[], None] | None = None) -> CaptureStats:
        """Trace, find or compile, and compare one run with the closure's own."""
        start_s = time.perf_counter()
        self._compiled.pop(key, None)
        try:
            expected = forward()
            traced = trace_forward(forward)
            artifact, is_cached = self.cache.get(traced)
            compiled = _Compiled(traced, artifact)
            if reset is not None:
                reset()
            check_equal(expected, compiled.run())
            if reset is not None:
                reset()
        except Exception as cause:
            raise capture_error(key, cause) from cause
        self._compiled[key] = compiled
        num_nodes = sum(node.op == "call_function" for node in traced.module.graph.nodes)
        duration_ms = (time.perf_counter() - start_s) * 1e3
        return CaptureStats(num_nodes, duration_ms, 0, is_cached=is_cached, num_compiled=int(not is_cached))

    def can_run(self, key: ShapeKey) -> bool:
        """See `ExecutionBackend.can_run`."""
        return key in self._compiled

    def replay_session(self) -> AbstractContextManager[None]:
        """Nothing to set up."""
        return nullcontext()

    def replay(self, key: ShapeKey) -> ModelOutput:
        """Call the compiled graph; its outputs are new tensors."""
        return self._compiled[key].run()

    def close(self) -> None:
        """Forget the graphs; what is on disk stays."""
        self._compiled.clear()
        self.cache.clear()
