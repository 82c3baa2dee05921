"""The one honest global: the batch now being run.

Only code that cannot be handed the batch may ask for it (an attention call made from inside a foreign model, an eager
break between two recorded segments). It is set around one forward and refuses nesting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphrunner.core.forward_batch import ForwardBatch

_active: ContextVar[ForwardBatch | None] = ContextVar("graphrunner_active_batch", default=None)


@contextmanager
def active_batch(batch: ForwardBatch) -> Iterator[None]:
    """Make `batch` the active one for the duration of one forward."""
    assert _active.get() is None, "a forward was started inside another forward"
    token = _active.set(batch)
    try:
        yield
    finally:
        _active.reset(token)


def current_batch() -> ForwardBatch:
    """The batch of the forward that is running now; asserts that there is one."""
    batch = _active.get()
    assert batch is not None, "no forward is running"
    return batch
