"""The first lines of the command: as little as possible comes before Ctrl-C is in good hands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphrunner.entrypoints.llm import LLM

EXIT_INTERRUPTED = 130


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Ctrl-C ends the process here without a word, as it ends programs that are not Python.

    For the time in which modules load: there is nothing to clean up, and no place to catch a KeyboardInterrupt well.
    """
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def llm_class() -> type[LLM]:
    """`LLM`, and with it torch, which loses a Ctrl-C while it loads."""
    with ending_at_once():
        from graphrunner.entrypoints.llm import LLM
    return LLM


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback at any moment."""
    with ending_at_once():
        from graphrunner.entrypoints.cli.main import app
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
