"""The life of a ready core: take commands, run a step, report it; until told to stop."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

import zmq

from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.errors import GraphRunnerError, ModelLoadError
from graphrunner.core.outputs import EngineOutput
from graphrunner.core.pooling import Pooling
from graphrunner.core.request import FinishReason
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.engine.sequence_ids import sequence_ids
from graphrunner.entrypoints.core_process.messages import (
    Add,
    End,
    News,
    Ready,
    RefusalKind,
    Refused,
    Report,
    Rested,
    Sleep,
    Stop,
    Wake,
    decode_command,
    encode,
    refusal_of,
)
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)
STATS_INTERVAL_S = 0.1
COMPILE_POLL_MS = 2


class ServedEngine(Protocol):
    """The engine as the loop drives it (`graphrunner.engine.token_engine.TokenEngine`). Not thread-safe."""

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def prepare(self, params: SamplingParams) -> Future[object] | None: ...

    def add_request(
        self, request_id: str, token_ids: tuple[int, ...], params: SamplingParams, *, priority: int
    ) -> None: ...

    def add_embedding_request(
        self, request_id: str, token_ids: tuple[int, ...], pooling: Pooling, *, priority: int
    ) -> None: ...

    def finish(self, sequences: Sequence[str], reason: FinishReason) -> bool: ...

    def step(self) -> list[EngineOutput]: ...

    def has_unfinished_requests(self) -> bool: ...

    def stats_since(self, step_id: int) -> EngineStats: ...

    @property
    def is_asleep(self) -> bool: ...

    def sleep(self, level: int) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Compiling:
    """A request that waits for its grammar, beside the steps of the others."""

    command: Add
    grammar: Future[object]


class CoreLoop:
    """Drives one engine from two sockets.

    Args:
        engine: built and captured.
        commands: PULL, connected.
        reports: PUSH, connected.
    """

    def __init__(self, engine: ServedEngine, commands: zmq.Socket[bytes], reports: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._commands = commands
        self._reports = reports
        self._compiling: list[_Compiling] = []
        self._next_stats_s = 0.0
        self._last_step_id = -1
        self._was_idle = False

    def run(self) -> None:
        """Return when told to stop. Raises what the engine could not contain."""
        engine = self._engine
        self._report(Ready(engine.model_name, engine.max_model_len, engine.vocab_size))
        while self._take_commands():
            outputs: Iterable[EngineOutput] = engine.step() if engine.has_unfinished_requests() else ()
            stats = self._stats_when_due()
            if outputs or stats is not None:
                self._report(News(outputs=tuple(outputs), stats=stats))

    def _take_commands(self) -> bool:
        """Carry out what has come, waiting for something when idle; False when told to stop."""
        news: list[str] = []
        refused: list[Refused] = []
        self._add_compiled(news, refused)
        has_news = bool(news or refused)  # which must not wait for the next command
        if not self._engine.has_unfinished_requests() and self._was_idle and not has_news:
            self._commands.poll(COMPILE_POLL_MS if self._compiling else None)
        while True:
            try:
                command = decode_command(self._commands.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            match command:
                case Stop():
                    return False
                case End(sequence_ids=ended, reason=reason):
                    self._end(ended, reason)
                case Add():
                    self._begin(command, news, refused)
                case Sleep() | Wake():
                    self._rest(command)
        if news or refused:
            self._report(News(admitted=tuple(news), refused=tuple(refused)))
        return True

    def _begin(self, command: Add, admitted: list[str], refused: list[Refused]) -> None:
        """Admit a request, or set it aside until its grammar is compiled."""
        try:
            grammar = None if isinstance(command.task, Pooling) else self._engine.prepare(command.task)
        except Exception as error:
            refused.append(_refusal(command, error))
            return
        if grammar is None or grammar.done():
            self._add(command, admitted, refused)
        else:
            self._compiling.append(_Compiling(command, grammar))

    def _add_compiled(self, admitted: list[str], refused: list[Refused]) -> None:
        ready = [each for each in self._compiling if each.grammar.done()]
        if ready:
            self._compiling = [each for each in self._compiling if not each.grammar.done()]
            for each in ready:
                self._add(each.command, admitted, refused)

    def _add(self, command: Add, admitted: list[str], refused: list[Refused]) -> None:
        request_id, ids, task, priority = command.request_id, command.token_ids, command.task, command.priority
        try:
            if isinstance(task, Pooling):
                self._engine.add_embedding_request(request_id, ids, task, priority=priority)
            else:
                self._engine.add_request(request_id, ids, task, priority=priority)
        except Exception as error:  # one request's trouble; the others go on
            refused.append(_refusal(command, error))
            return
        admitted.append(request_id)

    def _end(self, ended: Sequence[str], reason: FinishReason) -> None:
        self._compiling = [each for each in self._compiling if not set(_sequences(each.command)) & set(ended)]
        self._engine.finish(ended, reason)

    def _rest(self, command: Sleep | Wake) -> None:
        problem = None
        try:
            if isinstance(command, Wake):
                self._engine.wake()
            elif self._compiling:  # of which the engine does not know yet
                count = len(self._compiling)
                problem = f"cannot sleep while {count} requests wait for a grammar: let them finish, or abort them"
            else:
                self._engine.sleep(command.level)
        except ModelLoadError as error:  # it is as it was
            log.error("the engine is still asleep: %s", error)
            problem = "the weights cannot be read again; the log says why"  # with paths, which no client is told
        except GraphRunnerError as error:
            problem = str(error)
        self._report(Rested(self._engine.is_asleep, problem))

    def _stats_when_due(self) -> EngineStats | None:
        """A snapshot when the engine has just become idle, and every so often while it is busy."""
        is_idle = not self._engine.has_unfinished_requests()
        became_idle, self._was_idle = is_idle and not self._was_idle, is_idle
        if not became_idle and (is_idle or time.monotonic() < self._next_stats_s):
            return None
        self._next_stats_s = time.monotonic() + STATS_INTERVAL_S
        stats = self._engine.stats_since(self._last_step_id)
        if stats.steps:
            self._last_step_id = stats.steps[-1].step_id
        # The front names requests by other means; two hundred names a step would be most of the message.
        return replace(stats, steps=tuple(replace(step, request_ids=()) for step in stats.steps))

    def _report(self, report: Report) -> None:
        self._reports.send(encode(report))


def _refusal(command: Add, error: Exception) -> Refused:
    refusal = refusal_of(command.request_id, error)
    if refusal.kind is RefusalKind.BROKEN:
        log.error("request %s could not be taken in", command.request_id, exc_info=error)
    return refusal


def _sequences(command: Add) -> list[str]:
    return sequence_ids(command.request_id, 1 if isinstance(command.task, Pooling) else command.task.n)
