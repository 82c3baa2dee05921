"""Server-sent events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphrunner.core.errors import GraphRunnerError
from graphrunner.entrypoints.openai.errors import ApiError, ErrorResponse, api_error_from
from graphrunner.telemetry.log import get_logger

DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")
Chunk = TypeVar("Chunk", bound=msgspec.Struct)
log = get_logger(__name__)
_encode = msgspec.json.Encoder().encode


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


def event(chunk: msgspec.Struct) -> bytes:
    """One event: a line of strict JSON and an empty line."""
    return b"data: " + _encode(chunk) + b"\n\n"


async def events(chunks: AsyncGenerator[msgspec.Struct, None]) -> AsyncIterator[bytes]:
    """Frame chunks; a failure becomes an error event. The last event is [DONE] in either case."""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield event(chunk)
    except Exception as error:
        if not isinstance(error, (ApiError, GraphRunnerError)):
            log.error("a stream failed", exc_info=error)
        yield event(ErrorResponse(api_error_from(error).body))
    yield DONE


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


class EventStream(Response, Generic[Chunk]):
    """Sends events as they come and stops the work behind them when the client goes.

    Args:
        chunks: what to send.
        framed: how it becomes bytes; by default as chat streams are framed.
        close: ends the work; called exactly once, whatever happened.
        on_gone: called when the client went first.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[Chunk, None],
        *,
        close: Callable[[], Awaitable[None]],
        on_gone: Callable[[], None],
        framed: Callable[[AsyncGenerator[Chunk, None]], AsyncIterator[bytes]] = events,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._lines = framed(chunks)
        self._close = close
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        except (ClientGoneError, OSError):
            self._on_gone()
        finally:
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for line in self._lines:
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
