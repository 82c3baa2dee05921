"""Named ranges around the parts of a step, for a profiler's timeline. Off, they cost two attribute reads each.

This package does not know torch: whoever turns the ranges on brings the two calls that open and close one.
"""

from __future__ import annotations

from collections.abc import Callable

Push = Callable[[str], object]
Pop = Callable[[], object]


class Range:
    """One named range; a context manager that may be entered again and again, nested in others."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        if _Calls.push is not None:
            _Calls.push(f"graphrunner.{self._name}")

    def __exit__(self, *error: object) -> None:
        if _Calls.pop is not None:
            _Calls.pop()


class _Calls:
    push: Push | None = None
    pop: Pop | None = None


def turn_on(push: Push, pop: Pop) -> None:
    """From now on every range of the process calls `push` with its name, and `pop` at its end."""
    _Calls.push, _Calls.pop = staticmethod(push), staticmethod(pop)


def turn_off() -> None:
    """Ranges are silent again."""
    _Calls.push = _Calls.pop = None


SCHEDULE = Range("schedule")
LOAD_BATCH = Range("load_batch")
EXECUTE = Range("execute")
SAMPLE = Range("sample")
CAPTURE = Range("capture")
