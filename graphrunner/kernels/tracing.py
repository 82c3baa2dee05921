"""Whether the forward that runs now is being turned into a graph of torch operators, for a compiler to join.

Set around one forward by the execution backend that compiles it, so that layers and models do not know. While it is on,
the plain formulas of kernels/traced_ops.py stand in for the GPU's kernels, which a compiler cannot see into.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_is_on: ContextVar[bool] = ContextVar("graphrunner_tracing", default=False)


def is_tracing() -> bool:
    """What the innermost `tracing` said."""
    return _is_on.get()


def has_gpu_kernels(x: Tensor) -> bool:
    """Whether the GPU's own kernels take `x` now: it is there, and nobody traces."""
    return x.is_cuda and not _is_on.get()


@contextmanager
def tracing(is_on: bool = True) -> Iterator[None]:
    """Ask for torch operators alone; False inside of a trace (an eager break, an opaque operator) for kernels again."""
    token = _is_on.set(is_on)
    try:
        yield
    finally:
        _is_on.reset(token)
