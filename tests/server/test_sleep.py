"""Sleep and wake through the messages between front and core, and over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from loopback import RunningServer, start_server
from scripted_engine import FakeEngine

from graphrunner.core.errors import EngineDeadError, EngineStateError, ModelLoadError
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.entrypoints.openai.server_options import ServerOptions

REQUEST = {"prompt": "hi", "max_tokens": 4}


@pytest.fixture
def server() -> Iterator[RunningServer]:
    server = start_server(FakeEngine)
    yield server
    server.stop()


def run(server: RunningServer, work: Coroutine[object, object, None]) -> None:
    asyncio.run_coroutine_threadsafe(work, server.loop).result(10)


def test_a_sleeping_engine_refuses_and_wakes(server: RunningServer) -> None:
    engine = server.process._engine
    with server.http() as http:
        run(server, engine.sleep(2))
        assert engine.is_asleep and server.engine.is_asleep
        for stream in (False, True):
            answer = http.post("/v1/completions", json=REQUEST | {"stream": stream})
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert answer.json()["error"]["message"] == "the engine is asleep"
        run(server, engine.wake())
        assert not engine.is_asleep
        assert http.post("/v1/completions", json=REQUEST).json()["choices"][0]["text"] == "Hell"


def test_sleep_is_refused_at_work_and_work_goes_on(server: RunningServer) -> None:
    engine = server.process._engine
    stream = server.openai().completions.create(
        model="fake-model", prompt="slow", max_tokens=20, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(stream)
    with pytest.raises(EngineStateError, match="cannot sleep while 1 requests run"):
        run(server, engine.sleep())
    assert not engine.is_asleep
    text = first.choices[0].text + "".join(chunk.choices[0].text for chunk in stream)
    assert len(text) == 20
    server.wait_until(lambda: not server.engine.live)
    run(server, engine.sleep())
    assert engine.is_asleep


def test_sleep_is_refused_while_a_grammar_is_compiled(server: RunningServer) -> None:
    grammar: Future[object] = Future()
    asked = threading.Event()

    def prepare(params: SamplingParams) -> Future[object]:
        asked.set()
        return grammar

    server.engine.prepare = prepare  # type: ignore[method-assign]
    with server.http() as http, ThreadPoolExecutor() as pool:
        answer = pool.submit(http.post, "/v1/completions", json=REQUEST)
        assert asked.wait(10)
        with pytest.raises(EngineStateError, match="cannot sleep while 1 requests wait for a grammar"):
            run(server, server.process._engine.sleep())
        assert not server.engine.is_asleep
        grammar.set_result(None)
        assert answer.result(10).status_code == 200


@pytest.fixture
def sleepy() -> Iterator[RunningServer]:
    server = start_server(FakeEngine, ServerOptions(port=0, allow_sleep=True))
    yield server
    server.stop()


def test_routes_put_to_sleep_and_wake(sleepy: RunningServer) -> None:
    with sleepy.http() as http:
        for body, level in (({}, 1), ({"level": 2}, 2)):
            for _ in range(2):
                answer = http.post("/sleep", json=body)
                assert answer.status_code == 200 and answer.json() == {"is_asleep": True}
            assert sleepy.engine.is_asleep and sleepy.engine.level == level
            health = http.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "asleep"})
            assert http.post("/v1/completions", json=REQUEST).status_code == 503
            assert http.get("/v1/models").status_code == 200
            assert http.get("/debug/steps").json()["health"] == "asleep"
            for _ in range(2):
                answer = http.post("/wake", json={})
                assert answer.status_code == 200 and answer.json() == {"is_asleep": False}
            assert http.get("/health").json() == {"status": "ready"}
            assert http.post("/v1/completions", json=REQUEST).status_code == 200


def test_routes_refuse_what_cannot_be_done(sleepy: RunningServer) -> None:
    with sleepy.http() as http:
        for level in (0, 3, "1", True, None):
            error = http.post("/sleep", json={"level": level})
            assert error.status_code == 400 and error.json()["error"]["param"] == "level", level
        assert http.post("/wake", json={"level": 1}).json()["error"]["message"] == "unknown field: level"
        empty = http.post("/wake").json()["error"]
        assert empty["message"] == "the body is empty: send a JSON object, {} at least"
        stream = sleepy.openai().completions.create(
            model="fake-model", prompt="slow", max_tokens=20, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        busy = http.post("/sleep", json={})
        assert busy.status_code == 409 and "cannot sleep while 1 requests run" in busy.json()["error"]["message"]
        assert len([chunk for chunk in stream if chunk.choices and chunk.choices[0].text]) == 19
        sleepy.wait_until(lambda: not sleepy.engine.live)
        http.post("/sleep", json={})
        for error, shown in (
            (EngineStateError("3 MiB are free"), "3 MiB are free"),
            (ModelLoadError("/secret/place: gone"), "the weights cannot be read again; the log says why"),
        ):
            sleepy.engine.wake_error = error
            answer = http.post("/wake", json={})
            assert answer.status_code == 503 and answer.json()["error"]["message"] == shown
        sleepy.engine.wake_error = None
        assert http.post("/wake", json={}).status_code == 200


def test_routes_are_closed_unless_opened(server: RunningServer) -> None:
    with server.http() as http:
        for path in ("/sleep", "/wake"):
            answer = http.post(path, json={})
            assert answer.status_code == 403 and "--allow-sleep" in answer.json()["error"]["message"]
        assert not server.engine.is_asleep


def test_a_page_of_another_site_puts_nobody_to_sleep(sleepy: RunningServer) -> None:
    """A blob without a type is sent without Content-Type and without asking first; pages always say their origin."""
    headers = {"origin": "http://elsewhere.example"}
    with sleepy.http() as http:
        assert http.post("/sleep", content=b"{}", headers=headers).status_code == 400
        assert not sleepy.engine.is_asleep
        assert http.post("/sleep", content=b"{}").status_code == 200  # a program may leave it out


def test_several_at_once_are_answered_in_order(server: RunningServer) -> None:
    engine = server.process._engine

    async def both() -> None:
        await asyncio.gather(engine.sleep(), engine.wake(), engine.sleep(), engine.wake())

    run(server, both())
    assert not engine.is_asleep and not server.engine.is_asleep


def test_a_dead_core_answers_nobody(server: RunningServer) -> None:
    engine = server.process._engine
    server.engine.wake = lambda: (_ for _ in ()).throw(ValueError("broken"))  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError):
        run(server, engine.wake())
