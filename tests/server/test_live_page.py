"""/ and /debug/steps without a browser: what is sent, and that the page needs nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator

import httpx
import pytest
from loopback import RunningServer, start_server
from stepping_engine import NUM_SHOWN_STEPS, SteppingEngine

from graphrunner.entrypoints.openai.live_routes import PAGE
from graphrunner.entrypoints.openai.server_options import ServerOptions


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    server = start_server(lambda: SteppingEngine(num_steps=400))
    with server.http() as http:
        server.wait_until(lambda: len(http.get("/debug/steps").json()["steps"]) == NUM_SHOWN_STEPS)
    yield server
    server.stop()


def test_the_last_steps(http: httpx.Client) -> None:
    view = http.get("/debug/steps").json()
    assert (view["model"], view["health"], view["max_model_len"]) == ("fake-model", "ready", 4096)
    assert (view["num_waiting"], view["num_used_pages"], view["num_pages"], view["num_preemptions"]) == (2, 30, 120, 5)
    steps = view["steps"]
    assert len(steps) == NUM_SHOWN_STEPS and [step["id"] for step in steps] == sorted(step["id"] for step in steps)
    eager = next(step for step in steps if not step["is_graph"])
    assert eager["runner"] == "eager" and eager["key"] == "7t x 1r logits" and eager["num_padding_tokens"] == 0
    assert eager["miss"] == "NUM_TOKENS: more tokens than the largest captured size (7 > 4)"
    graph = next(step for step in steps if step["is_graph"])
    assert (graph["num_tokens"], graph["num_padding_tokens"], graph["miss"]) == (3, 1, None)
    verified = next(step for step in steps if step["num_drafts"])
    assert (verified["num_drafts"], verified["num_accepted"], verified["num_rounds"]) == (6, 3, 3)
    assert eager["num_drafts"] == eager["num_accepted"] == eager["num_rounds"] == 0


def test_only_new_steps(http: httpx.Client) -> None:
    last = http.get("/debug/steps").json()["steps"][-1]["id"]
    later = http.get("/debug/steps", params={"after": last - 2}).json()["steps"]
    assert [step["id"] for step in later][:2] == [last - 1, last]
    for bad in ("x", "", "9" * 20, "1.5"):
        answer = http.get("/debug/steps", params={"after": bad})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "after"


def test_tokens_are_counted(server: RunningServer, http: httpx.Client) -> None:
    before = http.get("/debug/steps").json()["num_output_tokens"]
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
    server.wait_until(lambda: http.get("/debug/steps").json()["num_output_tokens"] == before + 5)


def test_page_is_whole_and_shut(http: httpx.Client) -> None:
    """Its script and style are the only ones its own policy lets run, and it names no other place."""
    answer = http.get("/")
    text = answer.text
    assert answer.headers["content-type"].startswith("text/html") and text == PAGE.read_text()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src 'self'" in policy
    for tag in ("script", "style"):
        (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"\son\w+=|<script[^>]+|<link(?! rel=.icon. href=.data:)|<img|<iframe|@import", text)
    assert set(re.findall(r"https?://[^'\"\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)


def test_page_without_a_key_steps_with_one() -> None:
    server = start_server(SteppingEngine, ServerOptions(port=0, api_key=("secret-key",)))
    try:
        with server.http() as http:
            assert http.get("/").status_code == 200
            assert http.get("/debug/steps").status_code == 401
            with_key = http.get("/debug/steps", headers={"Authorization": "Bearer secret-key"})
            assert with_key.json()["health"] == "ready"
    finally:
        server.stop()
