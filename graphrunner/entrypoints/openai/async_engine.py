"""A synchronous engine on a thread of its own, as an `EngineClient`.

Commands (add, abort, stop) go in through a queue; what a step produced comes out through one
`call_soon_threadsafe` a step. Only the engine thread touches the engine; only the event loop touches the streams.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.errors import EmbeddingFailedError, EngineDeadError, GraphRunnerError, InvalidRequestError
from graphrunner.core.outputs import RequestOutput
from graphrunner.core.pooling import Pooling
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.engine.output_processor import RequestOutputKind
from graphrunner.entrypoints.openai.engine_client import Health, HealthState, ServerTokenizer
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)
STATS_INTERVAL_S = 0.1
JOIN_TIMEOUT_S = 10.0


class MetricsSource(Protocol):
    """The engine's metrics. `text` may be called from any thread."""

    def text(self, stats: EngineStats | None = None) -> bytes: ...


class SyncEngine(Protocol):
    """The engine as its thread drives it (`graphrunner.engine.llm_engine.LLMEngine`). Not thread-safe."""

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer(self) -> ServerTokenizer | None: ...

    @property
    def metrics(self) -> MetricsSource: ...

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        *,
        priority: int,
        output_kind: RequestOutputKind,
    ) -> None: ...

    def add_embedding_request(
        self, request_id: str, prompt: Sequence[int], pooling: Pooling, *, priority: int
    ) -> None: ...

    def abort_request(self, request_id: str) -> bool: ...

    def step(self) -> list[RequestOutput]: ...

    def has_unfinished_requests(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Add:
    request_id: str
    token_ids: Sequence[int]
    task: SamplingParams | Pooling
    priority: int


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = _Add | _Abort | _Stop
_Event = Callable[[], None]
"""Something to run on the event loop."""


class _Stream:
    """The `OutputStream` of one request. Lives on the event loop."""

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._abort = abort
        self._outputs: deque[RequestOutput] = deque()
        self._error: Exception | None = None
        self._has_ended = False  # nothing more will be put
        self._wake = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        self._has_ended = self._has_ended or output.finished
        self._wake.set()

    def end(self, error: Exception | None = None) -> None:
        self._has_ended = True
        self._error = error
        if not self.admitted.done() and error is not None:
            self.admitted.set_exception(error)
            self.admitted.exception()  # it may have no reader left; that is no news
        self._wake.set()

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if self._has_ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._outputs.popleft()

    async def aclose(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._abort(self.request_id)


class AsyncEngine:
    """Implements `EngineClient`.

    Args:
        build: makes the engine; called on the engine thread, so that the server can answer /health meanwhile.
        on_death: called on the event loop when the engine stopped by itself.
    """

    def __init__(self, build: Callable[[], SyncEngine], *, on_death: Callable[[], None] = lambda: None) -> None:
        self._build = build
        self._on_death = on_death
        self._health = Health(HealthState.STARTING)
        self._engine: SyncEngine | None = None
        self._stats = EngineStats()
        self._streams: dict[str, _Stream] = {}
        self._mailbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.num_aborts = 0
        """Requests that were stopped from outside before they ended."""

    def start(self) -> None:
        """Start loading. Called once, on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def wait_ready(self) -> None:
        """Return when the engine takes requests. Raises EngineDeadError when it could not start."""
        await self._ready.wait()
        self._check_alive()

    def drain(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        if self._health.state in (HealthState.STARTING, HealthState.READY):
            self._health = Health(HealthState.DRAINING)

    async def shutdown(self) -> None:
        """Stop the thread and close the engine. Open streams end with an error. Idempotent."""
        self._die("the server is shutting down", is_expected=True)
        self._mailbox.put(_Stop())
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT_S)

    @property
    def has_started(self) -> bool:
        """Whether the engine was built, so that what ended it came later."""
        return self._engine is not None

    @property
    def model_name(self) -> str:
        return self._built.model_name

    @property
    def max_model_len(self) -> int:
        return self._built.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._built.vocab_size

    @property
    def tokenizer(self) -> ServerTokenizer | None:
        return self._built.tokenizer

    def health(self) -> Health:
        return self._health

    def stats(self) -> EngineStats:
        return self._stats

    def metrics_text(self) -> bytes:
        return b"" if self._engine is None else self._engine.metrics.text(self._stats)

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        priority: int = 0,
    ) -> _Stream:
        """See `EngineClient.generate`."""
        return await self._submit(_Add(request_id, prompt_token_ids, sampling_params, priority))

    async def embed(
        self, request_id: str, prompt_token_ids: Sequence[int], pooling: Pooling, priority: int = 0
    ) -> Sequence[float]:
        """See `EngineClient.embed`."""
        stream = await self._submit(_Add(request_id, prompt_token_ids, pooling, priority))
        try:
            output = await anext(stream, None)
        finally:
            await stream.aclose()
        if output is None or output.embedding is None:
            cause = "it was stopped" if output is None else output.outputs[0].stop_reason
            raise EmbeddingFailedError(f"{request_id}: {cause}")
        return output.embedding

    async def _submit(self, command: _Add) -> _Stream:
        self._check_alive()
        request_id = command.request_id
        assert request_id not in self._streams, f"request {request_id} is live already"
        stream = self._streams[request_id] = _Stream(request_id, self._abort_now)
        self._mailbox.put(command)
        try:
            await stream.admitted
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        return stream

    async def abort(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._abort_now(request_id)
            stream.end()

    # -- event loop ---------------------------------------------------------------------------------------------

    @property
    def _built(self) -> SyncEngine:
        if self._engine is None:
            raise EngineDeadError(self._health.reason or "the engine is still starting")
        return self._engine

    def _check_alive(self) -> None:
        if self._health.state is HealthState.DEAD or self._engine is None:
            raise EngineDeadError(self._health.reason or "the engine is still starting")

    def _abort_now(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self.num_aborts += 1
            self._mailbox.put(_Abort(request_id))

    def _deliver(self, events: Sequence[_Event], outputs: Sequence[RequestOutput]) -> None:
        for event in events:
            event()
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:  # else it was aborted while the step ran
                if output.finished:
                    del self._streams[output.request_id]
                stream.put(output)

    def _admit(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and not stream.admitted.done():
            stream.admitted.set_result(None)

    def _refuse(self, request_id: str, error: Exception) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.end(error)

    def _become_ready(self, engine: SyncEngine) -> None:
        self._engine = engine
        if self._health.state is HealthState.STARTING:
            self._health = Health(HealthState.READY)
        self._ready.set()

    def _die(self, reason: str, *, is_expected: bool = False) -> None:
        if self._health.state is HealthState.DEAD:
            return
        self._health = Health(HealthState.DEAD, reason)
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.end(EngineDeadError(reason))
        self._ready.set()
        if not is_expected:
            self._on_death()

    # -- engine thread ------------------------------------------------------------------------------------------

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
            self._loop.call_soon_threadsafe(callback, *args)

    def _run(self) -> None:
        try:
            engine = self._build()
            try:
                self._stats = engine.stats()
                self._post(self._become_ready, engine)
                self._serve(engine)
            finally:
                engine.close()
        except GraphRunnerError as error:
            self._post(self._die, str(error))
        except BaseException as error:  # whatever ended the thread, clients must hear of it
            log.critical("the engine thread ended", exc_info=error)
            self._post(self._die, f"{type(error).__name__}: {error}")

    def _serve(self, engine: SyncEngine) -> None:
        """Alternate commands and steps until told to stop."""
        next_stats_s = 0.0
        while True:
            events: list[_Event] = []
            if not self._take_commands(engine, events):
                return
            if events:
                self._post(self._deliver, events, ())
            if engine.has_unfinished_requests():
                outputs = engine.step()
                if outputs:
                    self._post(self._deliver, (), outputs)
            is_idle = not engine.has_unfinished_requests()
            if is_idle or time.monotonic() >= next_stats_s:
                self._stats = engine.stats()
                next_stats_s = time.monotonic() + STATS_INTERVAL_S

    def _take_commands(self, engine: SyncEngine, events: list[_Event]) -> bool:
        """Carry out what waits in the mailbox, waiting for something when idle; False when told to stop."""
        should_wait = not engine.has_unfinished_requests()
        while True:
            try:
                command = self._mailbox.get(block=should_wait)
            except queue.Empty:
                return True
            should_wait = False
            match command:
                case _Stop():
                    return False
                case _Abort(request_id):
                    engine.abort_request(request_id)
                case _Add():
                    events.append(self._added(engine, command))

    def _added(self, engine: SyncEngine, command: _Add) -> _Event:
        request_id = command.request_id
        ids, task, priority = command.token_ids, command.task, command.priority
        try:
            if isinstance(task, Pooling):
                engine.add_embedding_request(request_id, ids, task, priority=priority)
            else:
                engine.add_request(request_id, ids, task, priority=priority, output_kind=RequestOutputKind.DELTA)
        except InvalidRequestError as error:
            refusal = error
            return lambda: self._refuse(request_id, refusal)
        return lambda: self._admit(request_id)
