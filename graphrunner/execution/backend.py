"""HOW a forward is recorded and replayed: the surface every execution backend has."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphrunner.core.errors import CaptureError
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ShapeKey
from graphrunner.device.device import Device, Stream

if TYPE_CHECKING:
    from graphrunner.core.forward_batch import ForwardBatch

Forward = Callable[[], ModelOutput]

NUM_FIRST_WARMUPS = 2
"""Calls before a backend's first recording: one compiles, loads and sets up what all keys share, the next runs as the
recording will."""


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """What recording one key cost.

    Attributes:
        num_nodes: kernels in the recording; 0 where the backend cannot tell.
        capture_ms: wall time, warm-ups included.
        memory_bytes: device memory that this key added.
        is_cached: whether a compiled artefact from disk was used.
        num_compiled: artefacts that had to be compiled.
    """

    num_nodes: int
    capture_ms: float
    memory_bytes: int
    is_cached: bool = False
    num_compiled: int = 0


class ExecutionBackend(ABC):
    """Records closures and replays them by key.

    A backend is handed a closure over static views, so it knows neither its runner nor the model. Call order:
    one `capture_session` around any number of `capture_one`; later, any number of `replay` inside one
    `replay_session`; `close` last. Lazily captured keys open a new session between steps.

    Attributes:
        name: as users write it.
        has_eager_breaks: attention runs in Python at every replay and reads `current_batch()`: the runner must have
            the step's batch active, with metadata of this step.
        is_traced: what is recorded are torch's operators, so a forward must be made of them and of nothing else.
    """

    name: str
    has_eager_breaks: bool = False
    is_traced: bool = False

    @abstractmethod
    def capture_session(self, stream: Stream | None = None) -> AbstractContextManager[None]:
        """Everything that must be true while recording (stream, pool, garbage collection frozen)."""

    @abstractmethod
    def capture_one(self, key: ShapeKey, forward: Forward, reset: Callable[[], None] | None = None) -> CaptureStats:
        """Record `forward` under `key`, after warm-up calls where the backend needs them.

        Args:
            key: shape being recorded; recording it again replaces the old one.
            forward: closure over static views; returns outputs that stay at one address.
            reset: undoes what a warm-up changed in state that must start clean.

        Raises:
            CaptureError: names the key and the first cause; the key stays unrecorded, memory is given back.
        """

    @abstractmethod
    def can_run(self, key: ShapeKey) -> bool:
        """Whether `key` is recorded. Host only."""

    @abstractmethod
    def replay_session(self) -> AbstractContextManager[None]:
        """Everything that must be true while replaying."""

    @abstractmethod
    def replay(self, key: ShapeKey) -> ModelOutput:
        """Run the recording of `key` on whatever the static views hold now.

        Aliasing: the returned tensors are overwritten by the next replay of any key of the same pool.
        Sync: none.
        """

    def num_nodes(self, key: ShapeKey) -> int:
        """Kernels of a recording that were counted after its capture; 0 where `CaptureStats` says it all."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Give back everything recorded. Idempotent; keys may be recorded again after."""


def batch_at_break(recorded: ForwardBatch, active: ForwardBatch) -> ForwardBatch:
    """What an eager break reads: the active step or, in a loop of several steps, the views it was recorded with.

    Args:
        recorded: the batch that the closure handed to the break.
        active: the step as its runner loaded it, with metadata of its own.
    """
    if recorded.positions is active.positions:
        return active
    return replace(recorded, attention_metadata=recorded.attention.prepare_metadata(recorded))


@contextmanager
def frozen_gc() -> Iterator[None]:
    """No garbage collection inside: one in the middle of a recording may free memory that the recording uses."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def recording_scope(device: Device, stream: Stream | None = None) -> Iterator[None]:
    """No garbage collection, the capture stream current, the device idle before and after."""
    device.synchronize()
    with frozen_gc(), device.capture_scope(stream):
        yield
    device.synchronize()


def capture_error(key: ShapeKey, cause: Exception) -> CaptureError:
    """The error of a failed recording, in one line."""
    text = str(cause).strip().splitlines()
    return CaptureError(f"{key}: {type(cause).__name__}: {text[0] if text else 'no message'}")
