"""One CUDA graph a key, all in one memory pool that is held for as long as any of them lives."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from graphrunner.core.errors import CaptureError
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ShapeKey
from graphrunner.execution.backend import CaptureStats, ExecutionBackend, Forward

NUM_WARMUPS = 2


class FullCudaGraphBackend(ExecutionBackend):
    """Records the whole forward. A replay is one launch, whatever its size.

    Args:
        pool: handle shared by backends whose graphs may reuse each other's memory; None makes one.
    """

    name = "full"

    def __init__(self, pool: tuple[int, int] | None = None) -> None:
        # A pool owned only by its first graph dies with that graph, so the handle is held here.
        self._pool = pool if pool is not None else torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graphs: dict[ShapeKey, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[ShapeKey, ModelOutput] = {}

    @contextmanager
    def capture_session(self, stream: object | None = None) -> Iterator[None]:
        """Freeze garbage collection: a collection while recording may free memory that is being recorded."""
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        torch.cuda.synchronize()
        try:
            yield
        finally:
            torch.cuda.synchronize()
            if was_enabled:
                gc.enable()

    def capture_one(self, key: ShapeKey, forward: Forward, reset: Callable[[], None] | None = None) -> CaptureStats:
        """See `ExecutionBackend.capture_one`."""
        start_s = time.perf_counter()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        try:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(NUM_WARMUPS):
                    forward()
            torch.cuda.synchronize()
            if reset is not None:
                reset()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                output = forward()
        except Exception as cause:
            torch.cuda.synchronize()
            raise CaptureError(f"{key}: {type(cause).__name__}: {cause}") from cause
        self._graphs[key], self._outputs[key] = graph, output
        memory_bytes = max(0, torch.cuda.memory_reserved() - before)
        return CaptureStats(0, (time.perf_counter() - start_s) * 1e3, memory_bytes)

    def can_run(self, key: ShapeKey) -> bool:
        """See `ExecutionBackend.can_run`."""
        return key in self._graphs

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        """Nothing to set up: graphs replay on the current stream."""
        yield

    def replay(self, key: ShapeKey) -> ModelOutput:
        """One graph launch. Sync: none."""
        self._graphs[key].replay()
        return self._outputs[key]

    def close(self) -> None:
        """Drop every graph; their memory returns to the allocator."""
        self._outputs.clear()
        self._graphs.clear()
