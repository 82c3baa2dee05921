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
from graphrunner.execution.backend import CaptureStats, ExecutionBackend, Forward, capture_error


class RecordingBackend(ExecutionBackend):
    """Calls instead of replays. One warm-up is enough: nothing is compiled."""

    name = "recording"

    def __init__(self, *, has_warm_up: bool = True) -> None:
        self._has_warm_up = has_warm_up
        self._forwards: dict[ShapeKey, Forward] = {}

    def capture_session(self, stream: Stream | None = None) -> AbstractContextManager[None]:
        """Nothing to set up."""
        return nullcontext()

    def capture_one(self, key: ShapeKey, forward: Forward, reset: Callable[[], None] | None = None) -> CaptureStats:
        """Call once, to hear of a failure now, and keep the closure.

        Without warm-up only the closure is kept: on a slow device the largest of many sizes would cost minutes.
        """
        start_s = time.perf_counter()
        self._forwards.pop(key, None)
        try:
            if self._has_warm_up:
                forward()
        except Exception as cause:
            raise capture_error(key, cause) from cause
        if reset is not None:
            reset()
        self._forwards[key] = forward
        return CaptureStats(num_nodes=0, capture_ms=(time.perf_counter() - start_s) * 1e3, memory_bytes=0)

    def can_run(self, key: ShapeKey) -> bool:
        """See `ExecutionBackend.can_run`."""
        return key in self._forwards

    def replay_session(self) -> AbstractContextManager[None]:
        """Nothing to set up."""
        return nullcontext()

    def replay(self, key: ShapeKey) -> ModelOutput:
        """Call the closure."""
        return self._forwards[key]()

    def close(self) -> None:
        """Forget every closure."""
        self._forwards.clear()
