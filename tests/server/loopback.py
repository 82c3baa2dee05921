"""A real server on loopback, on a thread; a scripted engine behind it in a core of its own, on another thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import openai
from scripted_engine import ByteTokenizer, FakeEngine

from graphrunner.entrypoints.core_process.core_loop import ServedEngine
from graphrunner.entrypoints.core_process.core_main import run_core
from graphrunner.entrypoints.core_process.launch import OnExit
from graphrunner.entrypoints.core_process.messages import CoreAddresses
from graphrunner.entrypoints.openai.async_engine import AsyncEngine
from graphrunner.entrypoints.openai.serve import ServerFailedError, ServerProcess
from graphrunner.entrypoints.openai.server_options import ServerOptions


class ThreadCore:
    """A core on a thread in place of a process: the same loop, sockets and messages."""

    def __init__(self, build: Callable[[], ServedEngine], addresses: CoreAddresses, on_exit: OnExit) -> None:
        def run() -> None:
            reason = run_core(build, addresses)
            on_exit("exit code 0" if reason is None else "exit code 1")

        self._thread = threading.Thread(target=run, name="core", daemon=True)
        self._thread.start()

    async def stop(self, grace_s: float) -> None:
        """A thread cannot be killed: one that still builds its engine is left behind."""
        deadline_s = time.monotonic() + grace_s
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.002)


def engine_maker(
    build: Callable[[], ServedEngine], *, may_restart: bool = False
) -> Callable[[Callable[[], None]], AsyncEngine]:
    """What `ServerProcess` makes its engine with."""

    def make(on_death: Callable[[], None]) -> AsyncEngine:
        return AsyncEngine(
            lambda addresses, on_exit: ThreadCore(build, addresses, on_exit),
            ByteTokenizer,
            on_death=on_death,
            may_restart=may_restart,
        )

    return make


@dataclass
class RunningServer:
    """A server on its own thread."""

    engine: FakeEngine
    process: ServerProcess
    url: str
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    failure: list[BaseException]

    def http(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, verify=False, trust_env=False, **options)  # type: ignore[arg-type]

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=20)

    def drain(self) -> None:
        self.loop.call_soon_threadsafe(self.process.request_drain)

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.process.request_stop)
        self.thread.join(10)
        assert not self.thread.is_alive(), "the server did not stop"

    def wait_until(self, is_true: Callable[[], bool], timeout_s: float = 5.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_true():
            assert time.monotonic() < deadline_s, "waited in vain"
            time.sleep(0.005)


def start_server(
    build: Callable[[], FakeEngine], options: ServerOptions | None = None, *, wait: bool = True
) -> RunningServer:
    """Start a server on a free port; with `wait`, return when it is ready."""
    listening, ready = threading.Event(), threading.Event()
    urls: list[str] = []
    engines: list[FakeEngine] = []
    failure: list[BaseException] = []
    loop = asyncio.new_event_loop()

    def built() -> FakeEngine:
        engines.append(build())
        return engines[-1]

    process = ServerProcess(
        engine_maker(built, may_restart=options is not None and options.restart_engine),
        options or ServerOptions(port=0),
        on_listening=lambda url: (urls.append(url), listening.set()),  # type: ignore[func-returns-value]
        on_ready=ready.set,
    )

    def run() -> None:
        try:
            loop.run_until_complete(process.run())
        except ServerFailedError as error:
            failure.append(error)
        finally:
            loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert listening.wait(10)
    if wait:
        assert ready.wait(10)
    return RunningServer(engines[0] if engines else FakeEngine(), process, urls[0], loop, thread, failure)
