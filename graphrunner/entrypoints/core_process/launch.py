"""Starting, watching and ending a core process from the front."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from graphrunner.config.engine_config import EngineConfig
from graphrunner.entrypoints.core_process.messages import START_LENGTH, CoreAddresses, Start, encode

_POLL_S = 0.01


class RunningCore(Protocol):
    """A core that was started, wherever it runs."""

    async def stop(self, grace_s: float) -> None:
        """Return when it is gone: by itself within `grace_s`, else by force. Idempotent."""
        ...


OnExit = Callable[[str], None]
"""Called once, from any thread, with how the core ended."""

LaunchCore = Callable[[CoreAddresses, OnExit], RunningCore]


class CoreProcess:
    """One core process, in a session of its own so that a terminal's Ctrl-C does not reach it.

    Made on the thread that lives as long as the front: Linux ends the process when the thread that started it ends.

    Args:
        command: what to run; it reads its `Start` from standard input, as `core_main` does.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, config: EngineConfig, addresses: CoreAddresses, on_exit: OnExit, command: Sequence[str]) -> None:
        start = encode(Start(config, addresses, os.getpid()))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died already, which `on_exit` will say
            self._process.stdin.write(START_LENGTH.pack(len(start)) + start)
            self._process.stdin.flush()
        self._on_exit = on_exit
        self._watcher = threading.Thread(target=self._watch, name="core-watch", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def stop(self, grace_s: float) -> None:
        """See `RunningCore`."""
        deadline_s = asyncio.get_running_loop().time() + grace_s
        while self._watcher.is_alive() and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_POLL_S)
        self.kill()
        while self._watcher.is_alive():
            await asyncio.sleep(_POLL_S)

    def kill(self) -> None:
        """End it and everything it started, at once. Idempotent."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def _watch(self) -> None:
        self._on_exit(_described(self._process.wait()))


def launcher(config: EngineConfig, command: Sequence[str] | None = None) -> LaunchCore:
    """Starts cores with these settings; with `command`, others than our own."""
    return lambda addresses, on_exit: CoreProcess(config, addresses, on_exit, command or core_command())


def core_command() -> list[str]:
    """Our own core."""
    # The folder a user stands in is on the child's path exactly when it is on ours.
    is_cwd_ours = "" in sys.path or os.getcwd() in sys.path
    return [sys.executable, *([] if is_cwd_ours else ["-P"]), "-m", "graphrunner.entrypoints.core_process"]


def _described(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
