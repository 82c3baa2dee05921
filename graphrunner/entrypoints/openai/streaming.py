"""Server-sent events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphrunner.core.errors import GraphRunnerError
from graphrunner.entrypoints.openai.errors import ApiError, ErrorResponse, api_error_from
from graphrunner.entrypoints.openai.generation import Generation, ReplyEvents
from graphrunner.entrypoints.openai.outbox import Outbox
from graphrunner.telemetry.log import get_logger

DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")
log = get_logger(__name__)
_encode = msgspec.json.Encoder().encode
_MARK = "\x00the text goes here\x00"


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


def event(chunk: msgspec.Struct) -> bytes:
    """One event: a line of strict JSON and an empty line."""
    return b"data: " + _encode(chunk) + b"\n\n"


def failure_events(error: Exception) -> bytes:
    """How a stream of chunks ends when it breaks: the error, and the usual last event."""
    log_failure(error)
    return event(ErrorResponse(api_error_from(error).body)) + DONE


def log_failure(error: Exception) -> None:
    """Say in the log what broke a stream, unless a client was told all of it."""
    if not isinstance(error, (ApiError, GraphRunnerError)):
        log.error("a stream failed", exc_info=error)


class TextEvent:
    """An event that differs from its neighbours in one text only: its bytes are made once, but for that text.

    Args:
        make: the chunk that holds a given text.
    """

    def __init__(self, make: Callable[[str], msgspec.Struct]) -> None:
        self._head, self._tail = event(make(_MARK)).split(_encode(_MARK))

    def __call__(self, text: str) -> bytes:
        """The event with this text."""
        return b"%b%b%b" % (self._head, _encode(text), self._tail)


async def unless_disconnected(receive: Receive, work: Coroutine[object, object, Result]) -> Result:
    """Await `work`, and cancel it when the client goes.

    The request's body must have been read: from then on the only thing to receive is the disconnect.

    Raises:
        ClientGoneError: `work` was cancelled and has ended.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Sends events as they come and stops the work behind them when the client goes.

    Args:
        generation: admitted; closed when the response ends, whatever happened.
        events: what its outputs become.
        on_gone: called when the client went first.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, events: ReplyEvents, *, on_gone: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._events = events
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(Outbox(scope), send))
        except (ClientGoneError, OSError):
            self._on_gone()
        finally:
            await self._generation.aclose()

    async def _send(self, outbox: Outbox, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._generation.push(self._events, outbox.put, outbox.end)
        await outbox.run(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
