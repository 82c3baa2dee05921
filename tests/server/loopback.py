"""A real server on loopback in front of a scripted engine, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import openai
from scripted_engine import FakeEngine

from graphrunner.entrypoints.openai.async_engine import AsyncEngine
from graphrunner.entrypoints.openai.serve import ServerFailedError, ServerProcess
from graphrunner.entrypoints.openai.server_options import ServerOptions


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
        return engines[0]

    process = ServerProcess(
        lambda on_death: AsyncEngine(built, on_death=on_death),
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
