"""A process that must not outlive its parent, however the parent goes."""

from __future__ import annotations

import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
EXIT_PARENT_GONE = 3


def die_with_parent(parent_pid: int, lifeline: int) -> None:
    """End this process, and those it started, when its parent ends.

    Two ways, because each has a gap: Linux kills it when the parent's thread that started it ends; everywhere, a
    thread waits for the end of `lifeline`, whose other end only the parent holds.

    Args:
        parent_pid: as the parent knows itself.
        lifeline: a file descriptor, read to its end; nothing comes through it.
    """
    threading.Thread(target=_wait_for_end, args=(lifeline,), name="parent-watch", daemon=True).start()
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it was gone before the wish was heard
            os._exit(EXIT_PARENT_GONE)


def _wait_for_end(lifeline: int) -> None:
    # Not through a file object: the lock of its buffer would be held for ever, and be in the way of a normal exit.
    while os.read(lifeline, 1):
        pass
    try:
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(EXIT_PARENT_GONE)
