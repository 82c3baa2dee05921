"""Eager breaks: places in a forward where a recording may stop, let Python run, and go on.

Layers call `eager_break` around attention. It is a plain call unless somebody listens, so a forward knows nothing of
how it is recorded, nothing is patched, and the listener of one recording is invisible to every other thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from graphrunner.core.forward_batch import ForwardBatch

BreakCall = Callable[["ForwardBatch", "torch.Tensor"], "torch.Tensor"]
"""What runs at a break. The batch is an argument because the metadata of a step is made anew each time, the tensor
because a listener may give it an address of its own."""


class BreakListener(Protocol):
    """Who records a forward in segments."""

    def on_break(self, call: BreakCall, batch: ForwardBatch, tensor: torch.Tensor) -> torch.Tensor:
        """End a segment, run `call`, begin the next; returns a tensor that keeps its address."""
        ...


_listener: ContextVar[BreakListener | None] = ContextVar("graphrunner_break_listener", default=None)


def eager_break(call: BreakCall, batch: ForwardBatch, tensor: torch.Tensor) -> torch.Tensor:
    """Run `call(batch, tensor)`; outside of the graph when a segmented recording is under way."""
    listener = _listener.get()
    return call(batch, tensor) if listener is None else listener.on_break(call, batch, tensor)


@contextmanager
def listening(listener: BreakListener | None) -> Iterator[None]:
    """Send this context's breaks to `listener`; None makes them plain calls (inside a break, for one)."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
