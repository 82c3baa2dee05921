"""From events to a connection: straight into it while it takes them, through a backlog while it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)
MAX_HEAD_BYTES = 64 << 10
_EXTENSION = "graphrunner.write_body"
WriteBody = Callable[[bytes], bool]


class DirectProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which lets a streamed response write its body without a task and without middleware.

    Used only between the start and the end of a chunked response; both still go through ASGI. A connection on which
    the head of a request does not arrive, or does not end, is given up, as one whose body does not arrive is.

    Args:
        head_timeout_s: from the connection, or from the first byte of a later request, to the end of its head.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        head_timeout_s: float,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the loop."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by the loop. The parser keeps a head however long it is, so that its length is looked at here."""
        super().data_received(data)
        if self._head_timer is None:
            self._num_head_bytes = 0
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.transport.close()

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._head_is_here()
        super().on_headers_complete()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self.transport.close)

    def _head_is_here(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def on_message_begin(self) -> None:
        """Called by the parser for every request of the connection."""
        super().on_message_begin()
        self._await_head()
        self.scope["extensions"] = {_EXTENSION: self._write_body}  # type: ignore[dict-item]

    def _write_body(self, data: bytes) -> bool:
        """Send a piece of the body as one chunk; False when the client reads too slowly for that."""
        if self.flow.write_paused:
            return False
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class Outbox:
    """What has to go out on one response. A slow reader holds up nobody: its events wait here.

    Args:
        scope: of the request; says whether its connection can be written to directly.
    """

    def __init__(self, scope: Scope) -> None:
        is_chunked = scope.get("http_version") == "1.1" and scope["method"] != "HEAD"
        self._write: WriteBody | None = scope.get("extensions", {}).get(_EXTENSION) if is_chunked else None
        self._backlog: list[bytes] = []
        self._has_begun = False  # the first piece goes through ASGI, where middleware looks for it
        self._has_ended = False
        self._changed = asyncio.Event()

    def put(self, data: bytes) -> None:
        """Send now if nothing waits, else after what does."""
        if not data:
            return
        if self._has_begun and not self._backlog and self._write is not None:
            try:
                if self._write(data):
                    return
            except Exception as error:  # nothing of it is out; ASGI may still manage, or say what is wrong
                log.error("a connection could not be written to", exc_info=error)
                self._write = None
        self._backlog.append(data)
        self._changed.set()

    def end(self) -> None:
        """Nothing more will be put."""
        self._has_ended = True
        self._changed.set()

    async def run(self, send: Send) -> None:
        """Send what waits, as fast as the client reads it; return when all of it is out and the end has come."""
        while True:
            num_waiting = len(self._backlog)
            if num_waiting:
                body = b"".join(self._backlog)
                await send({"type": "http.response.body", "body": body, "more_body": True})
                del self._backlog[:num_waiting]  # only now, so that nothing overtakes it
                self._has_begun = True
            elif self._has_ended:
                return
            else:
                self._changed.clear()
                await self._changed.wait()
