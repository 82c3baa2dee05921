"""A server for each test file, and the promise that a test leaves it idle and healthy."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from loopback import RunningServer, start_server
from scripted_engine import FakeEngine


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    """One server a test file."""
    server = start_server(FakeEngine)
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """The file's server; whatever the test did, it must be idle and healthy afterwards, with nothing live."""
    yield shared_server
    shared_server.wait_until(lambda: not shared_server.engine.live)
    with shared_server.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "canary", "max_tokens": 8})
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "Hello, w"
        assert http.get("/health").json() == {"status": "ready"}


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return server.openai()
