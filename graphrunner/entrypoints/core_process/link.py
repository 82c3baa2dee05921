"""The front's ends of the two sockets to a core, on the event loop."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import zmq

from graphrunner.core.errors import EngineDeadError
from graphrunner.entrypoints.core_process.messages import Command, CoreAddresses, Report, decode_report, encode

_MAX_SOCKET_PATH_LEN = 100  # the kernel's limit is 108, on some systems 104
_MAX_MESSAGES_AT_ONCE = 64  # then the loop's other work has a turn


class CoreLink:
    """Two sockets in a private folder: commands out, reports in; one wake-up of the loop for all that has come.

    Args:
        on_report: called on the loop with every report.
        on_broken: called on the loop when a report could not be received or read; nothing more will come.

    Raises:
        OSError: no folder can be made for the sockets.
    """

    def __init__(self, on_report: Callable[[Report], None], on_broken: Callable[[Exception], None]) -> None:
        self._on_report = on_report
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._folder = _private_folder()
        self.addresses = CoreAddresses(f"ipc://{self._folder}/commands", f"ipc://{self._folder}/reports")
        self._context = zmq.Context()
        self._commands, self._reports = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket, address in ((self._commands, self.addresses.commands), (self._reports, self.addresses.reports)):
            socket.set_hwm(0)  # admission bounds what can be under way; a core never waits for the front
            socket.linger = 0
            socket.bind(address)
        self._wake_fd = int(self._reports.getsockopt(zmq.FD))
        self._loop.add_reader(self._wake_fd, self.receive)
        self._is_closed = False

    def send(self, command: Command) -> None:
        """Hand a command over. Raises EngineDeadError when there is no core to take it."""
        try:
            self._commands.send(encode(command), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineDeadError(f"the engine core cannot be reached: {error}") from error

    def receive(self) -> None:
        """Hand on what has come. The loop calls it when something has; others may."""
        for _ in range(_MAX_MESSAGES_AT_ONCE):
            if self._is_closed:
                return
            try:
                report = decode_report(self._reports.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except Exception as error:
                self.close()
                self._on_broken(error)
                return
            self._on_report(report)
        self._loop.call_soon(self.receive)

    def remove_folder(self) -> None:
        """Take the sockets' names away, once the core has connected: nobody else can, and nothing stays on disk."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._wake_fd)
        self._commands.close()
        self._reports.close()
        self._context.term()
        self.remove_folder()


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="graphrunner-"))
    if len(str(folder)) + len("/commands") <= _MAX_SOCKET_PATH_LEN:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="graphrunner-", dir="/tmp"))
