"""Sleep and wake through the messages between front and core."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator

import pytest
from loopback import RunningServer, start_server
from scripted_engine import FakeEngine

from graphrunner.core.errors import EngineDeadError, EngineStateError

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
            assert answer.json()["error"]["message"] == "the engine is asleep or at work"
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
