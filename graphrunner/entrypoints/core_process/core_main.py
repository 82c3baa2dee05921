"""From the first instruction of a core process to its exit code."""

from __future__ import annotations

import errno
import gc
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO

import zmq

from graphrunner.config.engine_config import EngineConfig
from graphrunner.config.env import log_level
from graphrunner.core.errors import GraphRunnerError
from graphrunner.entrypoints.core_process.core_loop import CoreLoop, ServedEngine
from graphrunner.entrypoints.core_process.messages import (
    START_LENGTH,
    CoreAddresses,
    Failed,
    Hello,
    Start,
    decode_start,
    encode,
)
from graphrunner.entrypoints.core_process.parent_watch import die_with_parent
from graphrunner.telemetry.log import get_logger, setup_logging

log = get_logger(__name__)
EXIT_FAILED = 1
FLUSH_MS = 2000


def main(build: Callable[[EngineConfig], ServedEngine] | None = None) -> None:
    """Run one core. Its standard input gives the settings, and its end means that the front is gone.

    Args:
        build: makes the engine; by default the real one.
    """
    # The front decides: a terminal's Ctrl-C and a service manager's SIGTERM reach every process of the service.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = _read_start(sys.stdin.buffer)
    die_with_parent(start.parent_pid, sys.stdin.fileno())
    setup_logging(log_level(), start.config.telemetry.log_format)
    make = build or _built
    if run_core(lambda: make(start.config), start.addresses) is not None:
        sys.exit(EXIT_FAILED)


def run_core(build: Callable[[], ServedEngine], addresses: CoreAddresses) -> str | None:
    """Build an engine and serve it until told to stop; otherwise report why it ended, and return that."""
    context = zmq.Context()
    commands, reports = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in ((commands, addresses.commands), (reports, addresses.reports)):
        socket.set_hwm(0)  # the front's admission bounds what can be under way
        socket.connect(address)
    try:
        reports.send(encode(Hello()))
        reason = _serve(build, commands, reports)
        if reason is not None:
            reports.send(encode(Failed(reason)))
        return reason
    finally:
        commands.close(linger=0)
        reports.close(linger=FLUSH_MS)
        context.term()


def _serve(build: Callable[[], ServedEngine], commands: zmq.Socket[bytes], reports: zmq.Socket[bytes]) -> str | None:
    try:
        engine = build()
        try:
            CoreLoop(engine, commands, reports).run()
        finally:
            engine.close()
    except GraphRunnerError as error:
        return str(error)
    except BaseException as error:  # whatever it was, the front must hear of it
        first_line = str(error).strip().partition("\n")[0]
        if _is_out_of_memory(error):
            return f"not enough memory: {first_line or type(error).__name__}"
        log.critical("the engine core ended", exc_info=error)
        return f"{type(error).__name__}: {first_line}"
    return None


def _built(config: EngineConfig) -> ServedEngine:
    from graphrunner.engine.build import build_engine

    engine = build_engine(config).token_engine
    gc.collect()
    gc.freeze()  # what the model is made of is never garbage
    return engine


def _is_out_of_memory(error: BaseException) -> bool:
    """Of the host or of a device; torch has a kind of its own for each."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in words or "allocate memory" in words)
    )


def _read_start(stream: BinaryIO) -> Start:
    (num_bytes,) = START_LENGTH.unpack(stream.read(START_LENGTH.size))
    return decode_start(stream.read(num_bytes))
