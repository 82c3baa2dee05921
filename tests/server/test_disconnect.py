"""A client that goes away is one abort, wherever its request was; a normal end is none."""

from __future__ import annotations

import json
import socket
import time

import pytest
from loopback import RunningServer


def connect(server: RunningServer, path: str, body: dict[str, object]) -> socket.socket:
    """Send a request by hand, so that the socket can be closed at any moment."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    sock = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    sock.sendall(head.encode() + raw)
    return sock


def body_for(path: str, *, stream: bool) -> dict[str, object]:
    prompt = {"prompt": "slow"} if "chat" not in path else {"messages": [{"role": "user", "content": "slow"}]}
    return {**prompt, "max_tokens": 10_000, "ignore_eos": True, "stream": stream}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_close_at(server: RunningServer, path: str, is_stream: bool, num_tokens: int) -> None:
    engine = server.engine
    num_aborted = len(engine.aborted)
    sock = connect(server, path, body_for(path, stream=is_stream))
    server.wait_until(lambda: any(live.num_done >= num_tokens for live in list(engine.live.values())))
    sock.close()
    server.wait_until(lambda: not engine.live, timeout_s=2)
    assert len(engine.aborted) == num_aborted + 1


def test_close_with_several_prompts_and_outputs(server: RunningServer) -> None:
    num_aborted = len(server.engine.aborted)
    sock = connect(
        server, "/v1/completions", {**body_for("/v1/completions", stream=True), "prompt": ["slow"] * 3, "n": 2}
    )
    server.wait_until(lambda: len(server.engine.live) == 3)
    sock.close()
    server.wait_until(lambda: not server.engine.live, timeout_s=2)
    assert len(server.engine.aborted) == num_aborted + 3


def test_close_while_the_body_is_on_its_way(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    num_added = server.engine.num_added
    sock = socket.create_connection((host, int(port)), timeout=10)
    sock.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt": "a')
    time.sleep(0.05)
    sock.close()
    assert server.engine.num_added == num_added


def test_normal_ends_abort_nothing(server: RunningServer) -> None:
    num_aborted, num_added = len(server.engine.aborted), server.engine.num_added
    with server.http() as http:
        for index in range(100):
            body = {"prompt": "a", "max_tokens": 3, "stream": index % 2 == 0}
            assert http.post("/v1/completions", json=body).status_code == 200
    assert server.engine.num_added == num_added + 100
    assert len(server.engine.aborted) == num_aborted


def test_a_reader_that_stops_reading_does_not_hold_up_others(server: RunningServer) -> None:
    sock = connect(server, "/v1/completions", {**body_for("/v1/completions", stream=True), "max_tokens": 60})
    with server.http() as http:
        start_s = time.monotonic()
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert time.monotonic() - start_s < 2
    sock.close()
