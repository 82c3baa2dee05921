"""Whether the forward that runs now must give each row the same bits whatever rows stand beside it.

Set around one forward, so that two engines of one process may differ. Who launches kernels asks; layers and models do
not know. See docs/deterministic.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_on: ContextVar[bool] = ContextVar("graphrunner_batch_invariant", default=False)


def is_batch_invariant() -> bool:
    """What the innermost `batch_invariant` said."""
    return _is_on.get()


@contextmanager
def batch_invariant(is_on: bool) -> Iterator[None]:
    """Ask for kernels whose result for a row depends on that row alone, or for the fastest ones."""
    token = _is_on.set(is_on)
    try:
        yield
    finally:
        _is_on.reset(token)
