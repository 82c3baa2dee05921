"""Logging: one logger tree, a line format that names the request, and warnings that are said once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ROOT = "graphrunner"
_request_id: ContextVar[str] = ContextVar("graphrunner_request_id", default="")
_said: set[tuple[str, str]] = set()


class _NamesRequest(logging.Filter):
    """Puts the current request's id, if there is one, into every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        request_id = _request_id.get()
        record.request = f" [{request_id}]" if request_id else ""
        return True


def setup_logging(level: str = "warning") -> None:
    """Send the package's log to stderr, at debug, info, warning or error; an unknown level is warning. Idempotent."""
    root = logging.getLogger(_ROOT)
    if not any(handler.name == _ROOT for handler in root.handlers):
        handler = logging.StreamHandler()
        handler.name = _ROOT
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s%(request)s: %(message)s"))
        handler.addFilter(_NamesRequest())
        root.addHandler(handler)
        root.propagate = False
    root.setLevel(logging.getLevelNamesMapping().get(level.upper(), logging.WARNING))


def get_logger(name: str) -> logging.Logger:
    """The logger of a module. Nothing is configured here: a program that imports us keeps its own set-up."""
    return logging.getLogger(name)


@contextmanager
def request_logging(request_id: str) -> Iterator[None]:
    """Name `request_id` in every line logged inside."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def warn_once(logger: logging.Logger, key: str, message: str) -> bool:
    """Warn unless this logger warned about `key` before; whether it was said now."""
    if (logger.name, key) in _said:
        return False
    _said.add((logger.name, key))
    logger.warning(message)
    return True
