"""Start, run, stop: the life of a server process."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn

from graphrunner.core.errors import ConfigError, EngineDeadError
from graphrunner.entrypoints.openai.app import build_app
from graphrunner.entrypoints.openai.async_engine import AsyncEngine
from graphrunner.entrypoints.openai.engine_client import HealthState
from graphrunner.entrypoints.openai.outbox import DirectProtocol
from graphrunner.entrypoints.openai.server import make_server
from graphrunner.entrypoints.openai.server_options import ServerOptions
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)
ABORT_GRACE_S = 5  # for streams to hear that the server goes, before their connections are cut
BACKLOG = 2048


class ServerFailedError(Exception):
    """The engine could not start (exit code 2) or died (exit code 1)."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class _Uvicorn(uvicorn.Server):
    """uvicorn, with signals handed on instead of acted on."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_signal(sig)


class ServerProcess:
    """One server from socket to exit.

    Args:
        make_engine: makes the client of an engine core; given what to call when the engine dies.
        on_listening: called with the server's URL once the socket is bound; the model may still be loading.
        on_ready: called once requests are served.
    """

    def __init__(
        self,
        make_engine: Callable[[Callable[[], None]], AsyncEngine],
        options: ServerOptions,
        *,
        on_listening: Callable[[str], None] = lambda url: None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._make_engine = make_engine
        self._options = options
        self._on_listening = on_listening
        self._on_ready = on_ready
        self._failure: ServerFailedError | None = None
        self._stop_task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until a signal comes: SIGTERM finishes what runs, SIGINT (or a second signal) does not.

        Raises:
            ConfigError: the address cannot be bound, or the API keys cannot be read.
            ServerFailedError: the engine did not start, or died.
        """
        engine = self._make_engine(lambda: self._engine_died(engine))
        self._engine = engine
        self._server = make_server(engine, self._options)
        app = build_app(self._server)
        listener = _bound(self._options.host, self._options.port)
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=ABORT_GRACE_S,
            lifespan="off",
            ws="none",
            http=partial(DirectProtocol, head_timeout_s=self._options.body_timeout_s),  # type: ignore[arg-type]
        )
        self._uvicorn = _Uvicorn(config, self._signalled)
        self._loop = asyncio.get_running_loop()
        self._on_listening(_url(listener))
        ready = asyncio.create_task(self._announce(engine))
        with _signals_to(self._signalled):  # uvicorn takes them over only once it serves
            try:
                engine.start()
                await self._uvicorn.serve(sockets=[listener])
            finally:
                ready.cancel()
                await engine.shutdown()
                self._server.encoder.close()
                if self._server.tracer is not None:
                    await asyncio.to_thread(self._server.tracer.close)
                listener.close()
        if self._failure is not None:
            raise self._failure

    def request_drain(self) -> None:
        """What SIGTERM does. On the event loop."""
        if self._stop_task is None:
            self._stop_task = asyncio.create_task(self._drain())

    def request_stop(self) -> None:
        """What SIGINT does. On the event loop."""
        self._stop_soon()

    async def _announce(self, engine: AsyncEngine) -> None:
        try:
            await engine.wait_ready()
        except EngineDeadError:
            return  # `_engine_died` speaks of it
        self._on_ready()

    def _signalled(self, sig: int) -> None:
        """Runs between two bytecodes of the main thread: only hands the news to the loop."""
        self._loop.call_soon_threadsafe(self.request_stop if sig == signal.SIGINT else self._drain_or_stop)

    def _drain_or_stop(self) -> None:
        if self._stop_task is None:
            self.request_drain()
        else:
            self._stop_soon()

    def _stop_soon(self) -> None:
        self._server.admission.drain()
        if self._stop_task is not None:
            self._stop_task.cancel()
        self._stop_task = asyncio.create_task(self._end_streams())

    async def _drain(self) -> None:
        log.info("draining: %d outputs still run", self._server.admission.num_sequences)
        self._engine.drain()
        self._server.admission.drain()
        try:
            async with asyncio.timeout(self._options.drain_timeout_s):
                await self._server.admission.wait_empty()
        except TimeoutError:
            log.warning("drain_timeout_s=%g is over; what still runs is stopped", self._options.drain_timeout_s)
        await self._end_streams()

    async def _end_streams(self) -> None:
        """Let open streams end with an error, then stop uvicorn."""
        await self._engine.shutdown()
        self._uvicorn.should_exit = True

    def _engine_died(self, engine: AsyncEngine) -> None:
        health = engine.health()
        assert health.state is HealthState.DEAD
        self._failure = ServerFailedError(health.reason or "the engine stopped", 1 if engine.has_started else 2)
        if engine.has_started:  # at once: clients hear of it now, and the end of the server may take seconds
            log.error("the engine stopped: %s", health.reason)
        self._stop_soon()


@contextmanager
def _signals_to(on_signal: Callable[[int], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call `on_signal` inside; only in the main thread, where alone that can be."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sig: signal.signal(sig, lambda got, frame: on_signal(got)) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol must be named: asyncio switches Nagle's algorithm off only for sockets that say TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError("port", f"{host}:{port}", f"cannot be bound: {error.strerror or error}") from None
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
