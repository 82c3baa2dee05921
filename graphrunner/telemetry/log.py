"""Logging: one logger tree, lines that name the request, as text or as JSON, and warnings that are said once."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

from graphrunner.config.engine_config import LogFormat

_ROOT = "graphrunner"
_TEXT_FORMAT = "%(levelname)s %(name)s%(request)s: %(message)s"
_request_id: ContextVar[str] = ContextVar("graphrunner_request_id", default="")


class _NamesRequest(logging.Filter):
    """Puts the current request's id, if there is one, into every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        request_id = _request_id.get()
        record.request_id = request_id
        record.request = f" [{request_id}]" if request_id else ""
        return True


class _ToStderr(logging.Handler):
    """Writes to whatever stderr is when a line comes: a program may have changed or closed the one of the start.

    Attributes:
        held: records kept for later, errors excepted; None writes each at once.
    """

    held: list[logging.LogRecord] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.held is not None and record.levelno < logging.ERROR:
            self.held.append(record)
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # a log that cannot be written stops nothing
            self.handleError(record)


class _JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, request_id, what `fields` gave, exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", "")
        if request_id:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup_logging(level: str = "warning", log_format: LogFormat = LogFormat.TEXT) -> None:
    """Send the package's log to stderr, at debug, info, warning or error; an unknown level is warning.

    May be called again to change level and format.
    """
    root = logging.getLogger(_ROOT)
    handler = _own_handler()
    if handler is None:
        handler = _ToStderr()
        handler.name = _ROOT
        handler.addFilter(_NamesRequest())
        root.addHandler(handler)
        root.propagate = False
    handler.setFormatter(_JsonLines() if log_format is LogFormat.JSON else logging.Formatter(_TEXT_FORMAT))
    root.setLevel(logging.getLevelNamesMapping().get(level.upper(), logging.WARNING))


@contextmanager
def lines_held() -> Iterator[None]:
    """Keep the package's log, errors excepted, back until the end: around text written to a terminal piece by piece."""
    handler = _own_handler()
    if handler is None:
        yield
        return
    handler.held = []
    try:
        yield
    finally:
        held, handler.held = handler.held, None
        for record in held or ():
            handler.handle(record)


def _own_handler() -> _ToStderr | None:
    return next((handler for handler in logging.getLogger(_ROOT).handlers if isinstance(handler, _ToStderr)), None)


def adopt_logger(name: str) -> None:
    """Let the warnings of another package's logger come out as ours do. After `setup_logging`. Idempotent."""
    logger = logging.getLogger(name)
    own = _own_handler()
    logger.handlers = [] if own is None else [own]
    logger.propagate = False


def announce(text: str) -> None:
    """Tell whoever runs the program, on stderr, whatever the level: as it is, or as a line of a log that is JSON."""
    own = _own_handler()
    if own is not None and isinstance(own.formatter, _JsonLines):
        own.handle(logging.LogRecord(_ROOT, logging.INFO, "", 0, text, None, None))
        return
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def get_logger(name: str) -> logging.Logger:
    """The logger of a module. Nothing is configured here: a program that imports us keeps its own set-up."""
    return logging.getLogger(name)


def fields(**values: object) -> Mapping[str, object]:
    """What a JSON line shows as fields of its own: `log.info("...", extra=fields(status=200))`."""
    return {"fields": values}


@contextmanager
def request_logging(request_id: str) -> Iterator[None]:
    """Name `request_id` in every line logged inside."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)
