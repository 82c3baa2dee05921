"""The outputs of one request, for one reader on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from graphrunner.core.outputs import RequestOutput


class OutputStream:
    """Filled by the engine's client, read in one of two ways: pushed on as outputs come, or awaited at the end.

    Args:
        abort: called at most once, when the reader leaves before the end.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._abort = abort
        self._waiting: deque[RequestOutput] = deque()
        self._error: Exception | None = None
        self._has_ended = False  # nothing more will be put
        self._changed = asyncio.Event()
        self._take: Callable[[RequestOutput], None] | None = None
        self._fail: Callable[[Exception], None] | None = None

    # -- the engine's side --------------------------------------------------------------------------------------

    def put(self, output: RequestOutput) -> None:
        """Add an output; the one with `finished` is the last."""
        self._has_ended = self._has_ended or output.finished
        if self._take is not None:
            self._take(output)
        else:
            self._waiting.append(output)
            self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        """Nothing more will come; with an error, because of it."""
        self._has_ended = True
        self._error = error
        if error is not None:
            if not self.admitted.done():
                self.admitted.set_exception(error)
                self.admitted.exception()  # it may have no reader left; that is no news
            elif self._fail is not None:
                self._fail(error)
        self._changed.set()

    # -- the reader's side --------------------------------------------------------------------------------------

    def push_to(self, take: Callable[[RequestOutput], None], fail: Callable[[Exception], None]) -> None:
        """From now on hand outputs on the moment they come; first those that wait. Neither may raise."""
        self._take, self._fail = take, fail
        while self._waiting:
            take(self._waiting.popleft())
        if self._error is not None:
            fail(self._error)

    async def final(self) -> RequestOutput | None:
        """The last output, once it is there; None when the request was aborted. Raises what ended the stream."""
        while True:
            while self._waiting:
                output = self._waiting.popleft()
                if output.finished:
                    return output
            if self._error is not None:
                raise self._error
            if self._has_ended:
                return None
            self._changed.clear()
            await self._changed.wait()

    async def aclose(self) -> None:
        """Leave; aborts the request unless it has ended. Idempotent."""
        self._take = self._fail = None
        if not self._has_ended:
            self._has_ended = True
            self._abort(self.request_id)
