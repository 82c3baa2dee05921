"""The backend that needs no device: it keeps the closure and calls it again on the same static views.

Every rule about buffers, padding, buckets, keys, dispatch and output lifetime can be tested with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ShapeKey
from graphrunner.device.device import Stream
from graphrunner.device.tape_graph import OperatorCount
from graphrunner.execution.backend import CaptureStats, ExecutionBackend, Forward, capture_error


class RecordingBackend(ExecutionBackend):
    """Calls instead of replays. One warm-up is enough: nothing is compiled."""

    name = "recording"

    def __init__(self, *, has_warm_up: bool = True) -> None:
        self._has_warm_up = has_warm_up
        self._forwards: dict[ShapeKey, Forward] = {}
        self._num_nodes: dict[ShapeKey, int] = {}

    def capture_session(self, stream: Stream | None = None) -> AbstractContextManager[None]:
        """Nothing to set up."""
        return nullcontext()

    def capture_one(self, key: ShapeKey, forward: Forward, reset: Callable[[], None] | None = None) -> CaptureStats:
        """Call once, to hear of a failure now, and keep the closure.

        Without warm-up only the closure is kept: on a slow device the largest of many sizes would cost minutes.
        """
        start_s = time.perf_counter()
        self._forwards.pop(key, None)
        self._num_nodes.pop(key, None)
        try:
            if self._has_warm_up:
                self._counted(key, forward)
        except Exception as cause:
            raise capture_error(key, cause) from cause
        if reset is not None:
            reset()
        self._forwards[key] = forward
        capture_ms = (time.perf_counter() - start_s) * 1e3
        return CaptureStats(num_nodes=self.num_nodes(key), capture_ms=capture_ms, memory_bytes=0)

    def can_run(self, key: ShapeKey) -> bool:
        """See `ExecutionBackend.can_run`."""
        return key in self._forwards

    def replay_session(self) -> AbstractContextManager[None]:
        """Nothing to set up."""
        return nullcontext()

    def replay(self, key: ShapeKey) -> ModelOutput:
        """Call the closure; the first call counts its operators."""
        forward = self._forwards[key]
        return forward() if key in self._num_nodes else self._counted(key, forward)

    def num_nodes(self, key: ShapeKey) -> int:
        """Operators of a closure that was called; 0 before."""
        return self._num_nodes.get(key, 0)

    def close(self) -> None:
        """Forget every closure."""
        self._forwards.clear()
        self._num_nodes.clear()

    def _counted(self, key: ShapeKey, forward: Forward) -> ModelOutput:
        with OperatorCount() as operators:
            output = forward()
        self._num_nodes[key] = operators.count
        return output
