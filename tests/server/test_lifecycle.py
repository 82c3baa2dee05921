"""Starting, ready, draining, dead; keys, limits, timeouts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from loopback import RunningServer, engine_maker, start_server
from scripted_engine import FakeEngine

from graphrunner.core.errors import ConfigError, ModelLoadError
from graphrunner.entrypoints.core_process.link import CoreLink
from graphrunner.entrypoints.openai.async_engine import AsyncEngine
from graphrunner.entrypoints.openai.server_options import ServerOptions

SLOW = {"prompt": "slow", "ignore_eos": True, "max_tokens": 40}


@contextmanager
def running(options: ServerOptions | None = None) -> Iterator[RunningServer]:
    server = start_server(FakeEngine, options)
    try:
        yield server
    finally:
        server.stop()


def in_background(server: RunningServer, body: dict[str, object]) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []

    def post() -> None:
        with server.http() as http:
            answers.append(http.post("/v1/completions", json=body))

    thread = threading.Thread(target=post)
    thread.start()
    server.wait_until(lambda: bool(server.engine.live))
    return thread, answers


def test_starting_is_told_and_refused() -> None:
    may_build = threading.Event()

    def build() -> FakeEngine:
        assert may_build.wait(10)
        return FakeEngine()

    server = start_server(build, wait=False)
    try:
        with server.http() as http:
            assert (http.get("/health").status_code, http.get("/health").json()) == (503, {"status": "starting"})
            refused = http.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert http.get("/metrics").status_code == 200 and http.get("/v1/models").status_code == 503
            may_build.set()
            server.wait_until(lambda: http.get("/health").status_code == 200)
            assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    finally:
        may_build.set()
        server.stop()


def test_a_model_that_does_not_load_ends_the_server() -> None:
    def build() -> FakeEngine:
        raise ModelLoadError("no such folder: x")

    server = start_server(build, wait=False)
    server.thread.join(10)
    assert not server.thread.is_alive()
    assert str(server.failure[0]) == "no such folder: x" and server.failure[0].exit_code == 2


def test_drain_finishes_what_runs_and_refuses_what_is_new() -> None:
    server = start_server(FakeEngine)
    thread, answers = in_background(server, SLOW)
    with server.http() as http:
        server.drain()
        server.wait_until(lambda: http.get("/health").json() == {"status": "draining"})
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
    thread.join(10)
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 40
    server.thread.join(10)
    assert not server.thread.is_alive() and not server.failure and server.engine.is_closed
    assert server.engine.aborted == []


def test_drain_has_an_end() -> None:
    server = start_server(FakeEngine, ServerOptions(port=0, drain_timeout_s=0.1))
    thread, answers = in_background(server, {**SLOW, "max_tokens": 60})
    server.drain()
    server.thread.join(10)
    thread.join(10)
    assert not server.thread.is_alive() and answers[0].status_code == 503


def test_stop_tells_open_streams() -> None:
    server = start_server(FakeEngine)
    thread, answers = in_background(server, {**SLOW, "stream": True})
    server.stop()
    thread.join(10)
    lines = [line for line in answers[0].text.splitlines() if line]
    assert '"error"' in lines[-2] and lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("is_stream", [False, True])
def test_death_of_the_engine_is_a_clean_error_at_once(is_stream: bool) -> None:
    server = start_server(FakeEngine)
    thread, answers = in_background(server, {**SLOW, "stream": is_stream})
    server.engine.break_next_step = True
    thread.join(5)
    assert not thread.is_alive()
    assert "secret" not in answers[0].text and "not running" in answers[0].text
    assert answers[0].status_code == (200 if is_stream else 503)
    server.thread.join(10)
    assert "the device is gone" in str(server.failure[0]) and server.failure[0].exit_code == 1


def test_last_words_that_come_after_the_end_is_known_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    hears_at_s = 0.0
    receive, exited = CoreLink.receive, AsyncEngine._exited

    def known_first(engine: AsyncEngine, link: CoreLink, how: str) -> None:
        nonlocal hears_at_s
        exited(engine, link, how)
        hears_at_s = time.monotonic() + 0.1

    monkeypatch.setattr(CoreLink, "receive", lambda link: receive(link) if time.monotonic() > hears_at_s else None)
    monkeypatch.setattr(AsyncEngine, "_exited", known_first)
    server = start_server(FakeEngine)
    thread, answers = in_background(server, SLOW)
    hears_at_s = float("inf")
    server.engine.break_next_step = True
    thread.join(5)
    assert answers[0].status_code == 503
    server.thread.join(10)
    assert "the device is gone" in str(server.failure[0])


def test_keys(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("second-key\n\nthird-key\n")
    with running(ServerOptions(port=0, api_key=("first-key",), api_key_file=key_file)) as server, server.http() as http:
        for wrong in (
            {},
            {"authorization": "Bearer nope"},
            {"authorization": "first-key"},
            {"authorization": "Basic first-key"},
        ):
            answer = http.post("/v1/completions", json={"prompt": "a"}, headers=wrong)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert http.get("/metrics").status_code == 401 and http.get("/health").status_code == 200
        for key in ("first-key", "second-key", "third-key"):
            assert [model.id for model in server.openai(key).models.list()] == ["fake-model"]
        with pytest.raises(openai.AuthenticationError):
            server.openai("first-ke").models.list()


def test_too_many_requests() -> None:
    with running(ServerOptions(port=0, max_concurrent_requests=2)) as server, server.http() as http:
        thread, answers = in_background(server, {**SLOW, "n": 2})
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        thread.join(10)
        assert answers[0].status_code == 200
        assert http.post("/v1/completions", json={"prompt": "a", "n": 2}).status_code == 200
        for path, body, field in (
            ("completions", {"prompt": "a", "n": 3}, "n"),
            ("completions", {"prompt": ["a", "b", "c"]}, "prompt"),
            ("embeddings", {"input": ["a", "b", "c"]}, "input"),
        ):  # never to be had, so not worth coming back for
            never = http.post(f"/v1/{path}", json=body)
            assert never.status_code == 400 and never.json()["error"]["param"] == field


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_that_takes_too_long(is_stream: bool) -> None:
    with running(ServerOptions(port=0, request_timeout_s=0.1)) as server, server.http() as http:
        answer = http.post("/v1/completions", json={**SLOW, "stream": is_stream})
        assert answer.status_code == (200 if is_stream else 504) and "took too long" in answer.text
        server.wait_until(lambda: not server.engine.live)
        assert len(server.engine.aborted) == 1


def test_a_body_that_does_not_arrive() -> None:
    with running(ServerOptions(port=0, body_timeout_s=0.1)) as server:

        def slowly() -> Iterator[bytes]:
            yield b'{"prompt": '
            time.sleep(0.4)
            yield b'"a"}'

        with server.http() as http:
            assert http.post("/v1/completions", content=slowly()).status_code == 408


def test_request_ids_and_cors_are_off_by_default() -> None:
    with running() as server, server.http() as http:
        assert http.get("/health", headers={"x-request-id": "abc-1.2_3"}).headers["x-request-id"] == "abc-1.2_3"
        for odd in ("a b", "x" * 65, "a\tb", "<b>"):
            assert len(http.get("/health", headers={"x-request-id": odd}).headers["x-request-id"]) == 32
        assert "access-control-allow-origin" not in http.get("/health", headers={"origin": "https://a.test"}).headers
    with running(ServerOptions(port=0, cors_origin=("https://a.test",))) as server, server.http() as http:
        answer = http.get("/health", headers={"origin": "https://a.test"})
        assert answer.headers["access-control-allow-origin"] == "https://a.test"
        other = http.get("/health", headers={"origin": "https://b.test"})
        assert "access-control-allow-origin" not in other.headers


def test_a_port_in_use_is_one_clear_error() -> None:
    with running() as server:
        port = int(server.url.rpartition(":")[2])
        import asyncio

        from graphrunner.entrypoints.openai.serve import ServerProcess

        process = ServerProcess(engine_maker(FakeEngine), ServerOptions(port=port))
        with pytest.raises(ConfigError, match=f"port='127.0.0.1:{port}'"):
            asyncio.run(process.run())


def test_a_head_that_does_not_arrive() -> None:
    with running(ServerOptions(port=0, body_timeout_s=0.2)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for head in (b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"):
            with socket.create_connection((host, int(port)), timeout=5) as sock:
                sock.sendall(head)
                assert sock.recv(100) == b"", "the server gives the connection up"
        with server.http() as http:  # one connection for both: the second request comes after the time for a head
            assert http.get("/health").status_code == 200
            time.sleep(0.4)
            assert http.get("/health").status_code == 200


def test_a_head_that_does_not_end() -> None:
    with running() as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as sock, pytest.raises(ConnectionError):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ")
            for _ in range(256):
                sock.sendall(b"a" * (1 << 20))
        with server.http() as http:
            assert http.get("/health", headers={"x-long": "a" * 60_000}).status_code == 200
            body = {"prompt": "a", "user": "b" * 300_000, "max_tokens": 1}  # a body has a limit of its own
            assert http.post("/v1/completions", json=body).status_code == 200


def test_there_are_no_web_sockets() -> None:
    with running() as server, server.http() as http:
        upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        answer = http.get("/v1/models", headers={**upgrade, "sec-websocket-key": "not a key"})
        assert answer.status_code == 200 and "x-request-id" in answer.headers
