"""An engine core elsewhere, as an `EngineClient`: token ids go out, token ids come back, text is made here.

Everything here runs on the event loop. One message a step brings all requests' tokens; it becomes text and is handed
to the streams in the same turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace

from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.errors import EmbeddingFailedError, EngineDeadError, EngineStateError
from graphrunner.core.outputs import StepRecord
from graphrunner.core.pooling import Pooling
from graphrunner.core.request import FinishReason
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.engine.output_processor import OutputProcessor, RequestOutputKind
from graphrunner.engine.sequence_ids import sequence_ids
from graphrunner.engine.token_engine import EMBEDDING_PARAMS, NUM_SHOWN_STEPS
from graphrunner.entrypoints.core_process.launch import LaunchCore, RunningCore
from graphrunner.entrypoints.core_process.link import CoreLink
from graphrunner.entrypoints.core_process.messages import (
    Add,
    End,
    Failed,
    Hello,
    News,
    Ready,
    Report,
    Rested,
    Sleep,
    Stop,
    Wake,
)
from graphrunner.entrypoints.openai.engine_client import Health, HealthState
from graphrunner.entrypoints.openai.output_stream import OutputStream
from graphrunner.telemetry.log import get_logger
from graphrunner.telemetry.metrics import EngineMetrics
from graphrunner.tokenizer.tokenizer import Tokenizer

log = get_logger(__name__)
STOP_GRACE_S = 5.0
LAST_WORDS_S = 0.25  # a core that dies has said why; the message may still be on its way
SHUTTING_DOWN = "the server is shutting down"


class AsyncEngine:
    """Implements `EngineClient`.

    Args:
        launch: starts a core; called on the event loop.
        load_tokenizer: the model's tokenizer, loaded on a thread while the core loads.
        on_death: called when the engine stopped by itself and will not come back.
        may_restart: start another core when a ready one dies.
    """

    def __init__(
        self,
        launch: LaunchCore,
        load_tokenizer: Callable[[], Tokenizer | None],
        *,
        on_death: Callable[[], None] = lambda: None,
        may_restart: bool = False,
    ) -> None:
        self._launch = launch
        self._load_tokenizer = load_tokenizer
        self._on_death = on_death
        self._may_restart = may_restart
        self._health = Health(HealthState.STARTING)
        self._facts: Ready | None = None
        self._tokenizer: Tokenizer | None = None
        self._has_tokenizer = asyncio.Event()
        self._is_ready = asyncio.Event()
        self._metrics = EngineMetrics()
        self._processor = OutputProcessor(self._metrics)
        self._streams: dict[str, OutputStream] = {}
        self._stats = EngineStats()
        self._steps: deque[StepRecord] = deque(maxlen=NUM_SHOWN_STEPS)
        self._link: CoreLink | None = None
        self._core: RunningCore | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_asleep = False
        self._rests: deque[asyncio.Future[None]] = deque()  # answers come in the order of the commands
        self.num_aborts = 0
        """Requests that were stopped from outside before they ended."""

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start loading. Called once, on the event loop."""
        self._keep(self._read_tokenizer())
        self._start_core()

    async def wait_ready(self) -> None:
        """Return when the engine takes requests. Raises EngineDeadError when it could not start."""
        await self._is_ready.wait()
        self._check_alive()

    def drain(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        if self._health.state in (HealthState.STARTING, HealthState.READY):
            self._health = Health(HealthState.DRAINING)

    async def shutdown(self) -> None:
        """End the core. Open streams end with an error. Idempotent; returns when the core is gone."""
        self._die(SHUTTING_DOWN, is_expected=True)
        core, link = self._core, self._link
        if core is not None:
            grace_s = STOP_GRACE_S if self._tell_to_stop() else 0.0
            await core.stop(grace_s)
        if link is not None:
            link.close()
        for task in self._tasks:
            task.cancel()

    @property
    def is_asleep(self) -> bool:
        """Whether requests are refused until `wake`."""
        return self._is_asleep

    async def sleep(self, level: int = 1) -> None:
        """Have the core give the device back; see `TokenEngine.sleep`.

        Raises:
            EngineStateError: it did not, and why: requests are waiting or running, or there is no such level.
            EngineDeadError: there is no core.
        """
        await self._rest(Sleep(level))

    async def wake(self) -> None:
        """Have the core restore what `sleep` gave back; see `TokenEngine.wake`. Errors as `sleep`."""
        await self._rest(Wake())

    async def _rest(self, command: Sleep | Wake) -> None:
        self._check_alive()
        assert self._link is not None
        self._link.send(command)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rests.append(answer)
        await answer

    def _take_rested(self, report: Rested) -> None:
        self._is_asleep = report.is_asleep
        answer = self._rests.popleft()
        if answer.done():  # nobody waits any more
            return
        if report.problem is None:
            answer.set_result(None)
        else:
            answer.set_exception(EngineStateError(report.problem))

    @property
    def has_started(self) -> bool:
        """Whether the engine was ready once, so that what ended it came later."""
        return self._facts is not None

    # -- facts --------------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        return self._known.model_name

    @property
    def max_model_len(self) -> int:
        return self._known.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._known.vocab_size

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def health(self) -> Health:
        return self._health

    def stats(self) -> EngineStats:
        """As of the last report, with the last steps."""
        return replace(self._stats, steps=tuple(self._steps))

    def metrics_text(self) -> bytes:
        return self._metrics.text(self._stats) if self.has_started else b""

    # -- requests -----------------------------------------------------------------------------------------------

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        priority: int = 0,
        *,
        is_streamed: bool = True,
    ) -> OutputStream:
        """See `EngineClient.generate`."""
        kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY
        return await self._submit(Add(request_id, tuple(prompt_token_ids), sampling_params, priority), kind)

    async def embed(
        self, request_id: str, prompt_token_ids: Sequence[int], pooling: Pooling, priority: int = 0
    ) -> Sequence[float]:
        """See `EngineClient.embed`."""
        add = Add(request_id, tuple(prompt_token_ids), pooling, priority)
        stream = await self._submit(add, RequestOutputKind.FINAL_ONLY)
        try:
            output = await stream.final()
        finally:
            await stream.aclose()
        if output is None or output.embedding is None:
            cause = "it was stopped" if output is None else output.outputs[0].stop_reason
            raise EmbeddingFailedError(f"{request_id}: {cause}")
        return output.embedding

    async def abort(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._abort_now(request_id)
            stream.end()

    async def _submit(self, add: Add, kind: RequestOutputKind) -> OutputStream:
        self._check_alive()
        request_id = add.request_id
        assert request_id not in self._streams, f"request {request_id} is live already"
        params = EMBEDDING_PARAMS if isinstance(add.task, Pooling) else add.task
        tokenizer = None if isinstance(add.task, Pooling) else self._tokenizer
        stream = OutputStream(request_id, self._abort_now)
        self._processor.add_request(request_id, None, list(add.token_ids), params, kind, tokenizer)
        self._streams[request_id] = stream
        try:
            self._add(add)
            await stream.admitted
        except BaseException as error:
            self._forget(request_id)
            if isinstance(error, asyncio.CancelledError):
                self._end(sequence_ids(request_id, params.n), FinishReason.ABORT)
                self.num_aborts += 1
            raise
        return stream

    def _abort_now(self, request_id: str) -> None:
        if request_id in self._streams:
            self.num_aborts += 1
            self._end(self._forget(request_id), FinishReason.ABORT)

    def _forget(self, request_id: str) -> list[str]:
        """Drop a request here; its sequences, which the core may still have."""
        self._streams.pop(request_id, None)
        return self._processor.remove_request(request_id)

    def _end(self, sequences: Sequence[str], reason: FinishReason) -> None:
        """Tell the core that nobody wants these any more. One that cannot be told is lost."""
        if sequences and self._health.state is not HealthState.DEAD and self._link is not None:
            try:
                self._link.send(End(tuple(sequences), reason))
            except Exception as error:
                self._core_lost(f"the engine core cannot be told: {error}")

    def _add(self, add: Add) -> None:
        if self._link is None:
            raise EngineDeadError(self._health.reason or "the engine is still starting")
        try:
            self._link.send(add)
        except EngineDeadError as error:
            self._core_lost(str(error))
            raise

    @property
    def _known(self) -> Ready:
        if self._facts is None:
            raise EngineDeadError(self._health.reason or "the engine is still starting")
        return self._facts

    def _check_alive(self) -> None:
        if self._health.state in (HealthState.DEAD, HealthState.STARTING):
            raise EngineDeadError(self._health.reason or "the engine is still starting")

    # -- what the core says -------------------------------------------------------------------------------------

    def _heard(self, report: Report) -> None:
        try:
            self._take_in(report)
        except Exception as error:  # some streams have missed something: none may go on as if nothing had happened
            log.error("a report of the engine core could not be taken in", exc_info=error)
            self._core_lost(f"a report of the engine core could not be taken in: {type(error).__name__}: {error}")

    def _take_in(self, report: Report) -> None:
        match report:
            case News():
                self._take_news(report)
            case Rested():
                self._take_rested(report)
            case Hello():
                assert self._link is not None
                self._link.remove_folder()
            case Ready():
                self._keep(self._become_ready(report))
            case Failed(reason=reason):
                self._core_lost(reason)

    def _take_news(self, news: News) -> None:
        for request_id in news.admitted:
            stream = self._streams.get(request_id)
            if stream is not None and not stream.admitted.done():
                stream.admitted.set_result(None)
        for refused in news.refused:
            stream = self._streams.get(refused.request_id)
            if stream is not None:
                self._forget(refused.request_id)
                stream.end(refused.error())
        if news.outputs:
            processed = self._processor.process(news.outputs)
            if processed.to_finish:
                self._end(processed.to_finish, FinishReason.STOP)
            for output in processed.outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:  # else its reader left while the step ran
                    if output.finished:
                        del self._streams[output.request_id]
                    stream.put(output)
        if news.stats is not None:
            for step in news.stats.steps:
                self._steps.append(step)
                self._metrics.add_step(step)
            self._stats = replace(news.stats, steps=())

    async def _read_tokenizer(self) -> None:
        try:
            self._tokenizer = await asyncio.to_thread(self._load_tokenizer)
        except Exception as error:
            self._core_lost(str(error))
        self._has_tokenizer.set()

    async def _become_ready(self, facts: Ready) -> None:
        await self._has_tokenizer.wait()
        if self._health.state is HealthState.STARTING:
            self._health = Health(HealthState.READY)
        self._facts = facts
        self._is_ready.set()

    # -- how a core comes and goes ------------------------------------------------------------------------------

    def _start_core(self) -> None:
        loop = asyncio.get_running_loop()

        def broken(error: Exception) -> None:
            self._core_lost(f"a report of the engine core could not be read: {error}")

        link = self._link = CoreLink(self._heard, broken)

        def exited(how: str) -> None:  # on a thread of the launcher's
            with suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
                loop.call_soon_threadsafe(self._exited, link, how)

        try:
            self._core = self._launch(link.addresses, exited)
        except OSError as error:
            self._core_lost(f"the engine core cannot be started: {error}")

    def _exited(self, link: CoreLink, how: str) -> None:
        """The core of `link` is gone. What it said last is read first: it names the cause."""
        link.receive()
        if link is self._link and self._health.state is not HealthState.DEAD:
            self._keep(self._hear_last_words(link, how))

    async def _hear_last_words(self, link: CoreLink, how: str) -> None:
        """The end of a process can be known before the last that it sent has come through the sockets' own threads."""
        await asyncio.sleep(LAST_WORDS_S)
        if link is self._link:
            link.receive()
        if link is self._link:  # it ended without a word
            what = "died" if self.has_started else "ended while it started"
            self._core_lost(f"the engine core {what}: {how}")

    def _core_lost(self, reason: str) -> None:
        """Fail everything open; then another core, or the end."""
        if self._health.state is HealthState.DEAD:
            return
        if not (self._may_restart and self.has_started and self._health.state is HealthState.READY):
            self._die(reason)
            return
        log.error("%s; starting another", reason)
        self._fail_streams(reason)
        core, link = self._core, self._link
        self._health = Health(HealthState.STARTING, reason)
        self._stats = EngineStats()
        self._steps.clear()  # the next core counts its steps from 0
        self._core = self._link = None
        self._keep(self._replace_core(core, link))

    async def _replace_core(self, core: RunningCore | None, link: CoreLink | None) -> None:
        if core is not None:
            await core.stop(0.0)
        if link is not None:
            link.close()
        if self._health.state is HealthState.STARTING:
            self._start_core()

    def _die(self, reason: str, *, is_expected: bool = False) -> None:
        if self._health.state is HealthState.DEAD:
            return
        self._health = Health(HealthState.DEAD, reason)
        self._fail_streams(reason)
        self._is_ready.set()
        if not is_expected:
            self._on_death()

    def _fail_streams(self, reason: str) -> None:
        for request_id, stream in list(self._streams.items()):
            self._forget(request_id)
            stream.end(EngineDeadError(reason))
        self._is_asleep = False
        while self._rests:
            answer = self._rests.popleft()
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))

    def _tell_to_stop(self) -> bool:
        """Ask the core to leave by itself; only one that serves hears it."""
        if self._link is None or not self.has_started:
            return False
        try:
            self._link.send(Stop())
        except EngineDeadError:
            return False
        return True

    def _keep(self, work: Coroutine[object, object, None]) -> None:
        """Run a coroutine beside everything else; the set holds it until it is done."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
