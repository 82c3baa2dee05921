"""What the front and the engine core say to each other: typed, in MessagePack, one message a step.

Commands go to the core, reports come back. Settings, parameters, outputs and records are the engine's own dataclasses.
"""

from __future__ import annotations

import struct
from enum import Enum

import msgspec

from graphrunner.config.engine_config import EngineConfig
from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.errors import EngineStateError, InvalidRequestError
from graphrunner.core.outputs import EngineOutput
from graphrunner.core.pooling import Pooling
from graphrunner.core.request import FinishReason
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.scheduler.admission import QueueFullError


class CoreAddresses(msgspec.Struct, frozen=True):
    """Where a core connects: what it hears, and where it speaks."""

    commands: str
    reports: str


class Start(msgspec.Struct, frozen=True):
    """What a core process reads from its standard input: its settings and where to connect."""

    config: EngineConfig
    addresses: CoreAddresses
    parent_pid: int


# -- to the core ----------------------------------------------------------------------------------------------------


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A new request; the task says whether it generates or becomes a vector."""

    request_id: str
    token_ids: tuple[int, ...]
    task: SamplingParams | Pooling
    priority: int = 0


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sequences that are over: aborted, or ended by a stop string."""

    sequence_ids: tuple[str, ...]
    reason: FinishReason


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Give the device back; answered by `Rested`."""

    level: int = 1


class Wake(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Restore what `Sleep` gave back; answered by `Rested`."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Leave."""


Command = Add | End | Sleep | Wake | Stop


# -- to the front ---------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The core is connected and begins to load."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Requests may come."""

    model_name: str
    max_model_len: int
    vocab_size: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The core is about to leave: it could not start, or it broke."""

    reason: str


class Rested(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A `Sleep` or `Wake` was carried out; or refused, and the problem says why."""

    is_asleep: bool
    problem: str | None = None


class RefusalKind(Enum):
    """Why a request was not admitted."""

    INVALID = "invalid"
    QUEUE_FULL = "queue_full"
    NOT_NOW = "not_now"  # the engine is asleep
    BROKEN = "broken"  # the engine failed while it took the request in


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """A request that has not entered the engine. Field, value, problem as in `InvalidRequestError`."""

    request_id: str
    kind: RefusalKind
    field: str
    value: str | int | float | None
    problem: str

    def error(self) -> Exception:
        """What the front raises for it."""
        if self.kind is RefusalKind.BROKEN:
            return RuntimeError(self.problem)
        if self.kind is RefusalKind.NOT_NOW:
            return EngineStateError(self.problem)
        kind = QueueFullError if self.kind is RefusalKind.QUEUE_FULL else InvalidRequestError
        return kind(self.field, self.value, self.problem)


class News(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What happened since the last one: a step's outputs of all requests, who was let in, and now and then the state.

    `stats.steps` are the steps since the stats before.
    """

    admitted: tuple[str, ...] = ()
    refused: tuple[Refused, ...] = ()
    outputs: tuple[EngineOutput, ...] = ()
    stats: EngineStats | None = None


Report = Hello | Ready | Failed | News | Rested


def refusal_of(request_id: str, error: Exception) -> Refused:
    """An exception of `TokenEngine.add_request` as a message."""
    if isinstance(error, InvalidRequestError):
        kind = RefusalKind.QUEUE_FULL if isinstance(error, QueueFullError) else RefusalKind.INVALID
        value = error.value if isinstance(error.value, (str, int, float)) else str(error.value)[:200]
        if isinstance(value, int) and abs(value) >= 1 << 63:
            value = str(value)[:200]
        return Refused(request_id, kind, error.field, value, error.problem)
    if isinstance(error, EngineStateError):
        return Refused(request_id, RefusalKind.NOT_NOW, "", None, str(error))
    return Refused(request_id, RefusalKind.BROKEN, "", None, f"{type(error).__name__}: {error}")


START_LENGTH = struct.Struct("<Q")
"""Stands before a `Start` on a core's standard input, which stays open behind it."""

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_start = msgspec.msgpack.Decoder(Start).decode
