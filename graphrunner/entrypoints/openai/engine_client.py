"""The seam between HTTP and an engine: all that the server knows of it.

`AsyncEngine` implements it with messages to a core process. Tests put a scripted engine into the core's place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.pooling import Pooling
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.entrypoints.openai.output_stream import OutputStream


class HealthState(Enum):
    """Where an engine is in its life; only READY takes requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Health:
    """State of an engine, and the first cause when it is dead (for logs; it may hold paths)."""

    state: HealthState
    reason: str | None = None


class ServerTokenizer(Protocol):
    """What the server needs of a tokenizer. Called on one thread at a time."""

    @property
    def eos_token_ids(self) -> Iterable[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> list[int]: ...


class EngineClient(Protocol):
    """An engine as the server sees it. Every method is called on the event loop and must not block it."""

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer(self) -> ServerTokenizer | None: ...

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        priority: int = 0,
        *,
        is_streamed: bool = True,
    ) -> OutputStream:
        """Return once the request is admitted.

        Streamed, each output holds only what is new: text, token ids and logprobs per output index, with the finish
        reason on the last of each index. Otherwise one output comes, at the end, with all of it.

        Raises:
            InvalidRequestError: refused at the door.
            EngineDeadError: nothing can be served; streams that were open raise it too.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends. Idempotent."""
        ...

    async def embed(
        self, request_id: str, prompt_token_ids: Sequence[int], pooling: Pooling, priority: int = 0
    ) -> Sequence[float]:
        """The pooled hidden states of a prompt, not normalized.

        Raises:
            InvalidRequestError, EngineDeadError: as `generate`.
            EmbeddingFailedError: the engine gave the request up.
        """
        ...

    @property
    def is_asleep(self) -> bool: ...

    async def sleep(self, level: int = 1) -> None:
        """Give the device back; requests are refused until `wake`. Raises EngineStateError when it cannot be done."""
        ...

    async def wake(self) -> None:
        """Restore what `sleep` gave back. Raises EngineStateError when there is no memory for it."""
        ...

    def health(self) -> Health: ...

    def stats(self) -> EngineStats: ...

    def metrics_text(self) -> bytes:
        """The engine's own metrics in Prometheus' text format."""
        ...
