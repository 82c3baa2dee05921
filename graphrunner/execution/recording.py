"""The backend that needs no device: it keeps the closure and calls it again on the same static views.

Every rule about buffers, padding, buckets, keys, dispatch and output lifetime can be tested with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from graphrunner.core.errors import CaptureError
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ShapeKey
from graphrunner.execution.backend import CaptureStats, ExecutionBackend, Forward


class RecordingBackend(ExecutionBackend):
    """Calls instead of replays.

    Args:
        is_poisoning: overwrite a replay's outputs when the next one starts, so that a late reader is loud.
        has_warm_up: call the forward once at capture, so that one which cannot run fails there. A production engine
            on the CPU leaves this out: a call is all that a recording costs, and there may be many sizes.
    """

    name = "recording"

    def __init__(self, *, is_poisoning: bool = False, has_warm_up: bool = False) -> None:
        self._forwards: dict[ShapeKey, Forward] = {}
        self._is_poisoning = is_poisoning
        self._has_warm_up = has_warm_up
        self._last: ModelOutput | None = None

    @contextmanager
    def capture_session(self, stream: object | None = None) -> Iterator[None]:
        """Nothing to set up."""
        yield

    def capture_one(self, key: ShapeKey, forward: Forward, reset: Callable[[], None] | None = None) -> CaptureStats:
        """Keep the closure, after a warm-up when asked for."""
        start_s = time.perf_counter()
        try:
            if self._has_warm_up:
                forward()
        except Exception as cause:
            raise CaptureError(f"{key}: {type(cause).__name__}: {cause}") from cause
        if reset is not None:
            reset()
        self._forwards[key] = forward
        return CaptureStats(num_nodes=0, capture_ms=(time.perf_counter() - start_s) * 1e3, memory_bytes=0)

    def can_run(self, key: ShapeKey) -> bool:
        """See `ExecutionBackend.can_run`."""
        return key in self._forwards

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        """Nothing to set up."""
        yield

    def replay(self, key: ShapeKey) -> ModelOutput:
        """Call the closure."""
        if self._is_poisoning and self._last is not None:
            _poison(self._last)
        self._last = self._forwards[key]()
        return self._last

    def close(self) -> None:
        """Forget every closure."""
        self._forwards.clear()
        self._last = None


def _poison(output: ModelOutput) -> None:
    for tensor in (output.logits, output.hidden_states, output.token_ids):
        if tensor is not None:
            tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
