"""Logging: one logger tree, and warnings that are said once."""

import logging

from graphrunner.config.env import log_level

_said: set[str] = set()


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; the level comes from GRAPHRUNNER_LOG."""
    root = logging.getLogger("graphrunner")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
        root.setLevel(log_level().upper())
        root.propagate = False
    return logging.getLogger(name)


def warn_once(logger: logging.Logger, key: str, message: str) -> bool:
    """Warn unless `key` was warned about before; whether it was said now."""
    if key in _said:
        return False
    _said.add(key)
    logger.warning(message)
    return True
