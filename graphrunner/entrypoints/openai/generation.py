"""The streams of one HTTP request: admitted together, read together, closed together."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Protocol

from graphrunner.core.outputs import RequestOutput
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.entrypoints.openai.admission import Ticket
from graphrunner.entrypoints.openai.engine_client import EngineClient
from graphrunner.entrypoints.openai.errors import ApiError
from graphrunner.entrypoints.openai.front_metrics import FrontMetrics
from graphrunner.entrypoints.openai.output_stream import OutputStream
from graphrunner.entrypoints.openai.responses import PromptTokensDetails, Usage
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)
_FAILED = frozenset({"error", "abort"})


@dataclass(slots=True)
class UsageCount:
    """Tokens of a request, counted as its outputs come."""

    prompt_lens: Sequence[int]
    num_completion_tokens: int = 0
    cached_lens: dict[int, int] = field(default_factory=dict)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count one delta, or a whole answer."""
        for each in output.outputs:
            self.num_completion_tokens += len(each.token_ids)
        if output.num_cached_tokens and prompt_index not in self.cached_lens:
            self.cached_lens[prompt_index] = min(output.num_cached_tokens, self.prompt_lens[prompt_index])

    def usage(self) -> Usage:
        """As OpenAI writes it: a prompt counts once, however many outputs it has."""
        num_prompt_tokens = sum(self.prompt_lens)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self.num_completion_tokens,
            total_tokens=num_prompt_tokens + self.num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self.cached_lens.values())),
        )


class ReplyEvents(Protocol):
    """Turns the outputs of a streamed request into server-sent events. Every call returns whole events, or nothing."""

    def first(self) -> bytes:
        """What goes out before the first token."""
        ...

    def take(self, prompt_index: int, output: RequestOutput) -> bytes:
        """What one step added to a prompt's outputs."""
        ...

    def last(self) -> bytes:
        """The end, after everything."""
        ...

    def failed(self, error: Exception) -> bytes:
        """The end in place of what would have followed."""
        ...


class Generation:
    """Streams that belong to one HTTP request.

    Args:
        ticket: their room in the server; released by `aclose`.
        timeout_s: from now; then the outputs end with 504.
    """

    def __init__(self, ticket: Ticket, metrics: FrontMetrics, timeout_s: float) -> None:
        self._ticket = ticket
        self._metrics = metrics
        self._streams: list[OutputStream] = []
        self._start_s = time.perf_counter()
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._num_open = 0
        self._events: ReplyEvents | None = None
        self._write: Callable[[bytes], None] = _drop
        self._on_end: Callable[[], None] = _nothing

    async def start(
        self,
        client: EngineClient,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        priority: int,
        *,
        is_streamed: bool,
    ) -> None:
        """Admit every prompt; when one is refused none stays. Raises as `EngineClient.generate`."""
        for index, token_ids in enumerate(prompts):
            name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
            self._streams.append(await client.generate(name, token_ids, params, priority, is_streamed=is_streamed))

    async def collect(self, take: Callable[[int, RequestOutput], None]) -> None:
        """Hand over every output as it comes, by the index of its prompt; return when all have ended.

        Raises:
            ApiError: 504 out of time, 500 the engine gave a request up.
            EngineDeadError: the engine went.
        """
        events, has_ended = _Collected(take), asyncio.Event()
        self.push(events, _drop, has_ended.set)
        await has_ended.wait()
        if events.error is not None:
            raise events.error

    async def finals(self) -> list[RequestOutput]:
        """The whole output of every prompt, once all are there; for requests that were not streamed. As `collect`."""
        outputs: dict[int, RequestOutput] = {}
        await self.collect(outputs.__setitem__)
        return [output for _, output in sorted(outputs.items())]

    def push(self, events: ReplyEvents, write: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """Write events the moment outputs come, in the same turn of the loop; `on_end` follows the last of them."""
        self._events, self._write, self._on_end = events, write, on_end
        self._num_open = len(self._streams)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(self._deadline_s, lambda: self._fail(_out_of_time()))
        write(events.first())
        for index, stream in enumerate(list(self._streams)):
            stream.push_to(partial(self._take, index), self._fail)

    async def aclose(self) -> None:
        """Abort what still runs and leave. Idempotent."""
        self._events = None
        if self._timer is not None:
            self._timer.cancel()
        streams, self._streams = self._streams, []
        for stream in streams:
            await stream.aclose()
        self._ticket.release()

    def _take(self, prompt_index: int, output: RequestOutput) -> None:
        events = self._events
        if events is None:  # it has failed already
            return
        try:
            for each in output.outputs:
                if each.finish_reason is not None and each.finish_reason in _FAILED:
                    raise _given_up()
            data = events.take(prompt_index, output)
            self._num_open -= output.finished
            if self._num_open == 0:
                self._metrics.e2e_s.observe(time.perf_counter() - self._start_s)
                self._finish(data + events.last())
            elif data:
                self._write(data)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End with what is said of an error. A second failure on the way still ends it."""
        if self._events is None:
            return
        try:
            self._finish(self._events.failed(error))
        except Exception as second:
            log.error("a reply could not be ended properly", exc_info=second)

    def _finish(self, data: bytes) -> None:
        self._events = None
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._write(data)
        finally:
            self._on_end()


class _Collected:
    """`ReplyEvents` for a reader of our own."""

    def __init__(self, take: Callable[[int, RequestOutput], None]) -> None:
        self._take = take
        self.error: Exception | None = None

    def first(self) -> bytes:
        return b""

    def take(self, prompt_index: int, output: RequestOutput) -> bytes:
        self._take(prompt_index, output)
        return b""

    def last(self) -> bytes:
        return b""

    def failed(self, error: Exception) -> bytes:
        self.error = error
        return b""


def new_request_id(prefix: str) -> str:
    """chatcmpl-..., cmpl-...: never taken from the client, so always unique."""
    return f"{prefix}-{uuid.uuid4().hex}"


def _out_of_time() -> ApiError:
    return ApiError(HTTPStatus.GATEWAY_TIMEOUT, "the request took too long", code="timeout")


def _given_up() -> ApiError:
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the engine could not complete this request")


def _drop(data: bytes) -> None:
    """Nowhere to write."""


def _nothing() -> None:
    """Before `push` nobody waits for the end."""
