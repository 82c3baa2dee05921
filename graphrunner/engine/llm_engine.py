"""Prompts in, text out: a `TokenEngine` with a voice, which turns token ids into `RequestOutput`s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.outputs import RequestOutput
from graphrunner.core.pooling import Pooling
from graphrunner.core.request import FinishReason
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.startup_report import StartupReport
from graphrunner.engine.engine_core import EngineCore
from graphrunner.engine.output_processor import OutputProcessor, RequestOutputKind
from graphrunner.engine.token_engine import EMBEDDING_PARAMS, TokenEngine

if TYPE_CHECKING:
    from graphrunner.telemetry.metrics import EngineMetrics
    from graphrunner.telemetry.step_trace import StepTrace
    from graphrunner.tokenizer.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, object]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""


class LLMEngine:
    """A whole engine, driven by whoever calls `step`. Not thread-safe.

    Args:
        token_engine: checks requests and runs the steps.
        tokenizer: None when the engine was started without one.
        processor: makes `RequestOutput`s.
        metrics: what `processor` and the steps were counted in.
    """

    def __init__(
        self,
        token_engine: TokenEngine,
        *,
        tokenizer: Tokenizer | None,
        processor: OutputProcessor,
        metrics: EngineMetrics,
    ) -> None:
        self.token_engine = token_engine
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._processor = processor

    @property
    def core(self) -> EngineCore:
        return self.token_engine.core

    @property
    def step_trace(self) -> StepTrace:
        return self.token_engine.step_trace

    @property
    def max_model_len(self) -> int:
        return self.token_engine.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.token_engine.vocab_size

    @property
    def model_name(self) -> str:
        return self.token_engine.model_name

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    ) -> None:
        """Admit a request; its `n` outputs become `n` sequences that share the prompt's pages.

        Raises:
            InvalidRequestError: names the field and the value; nothing of the request stays behind.
        """
        params = sampling_params or SamplingParams()
        text, token_ids = self.encode_prompt(prompt)
        self.token_engine.add_request(request_id, token_ids, params, priority=priority)
        self._processor.add_request(request_id, text, list(token_ids), params, output_kind, self.tokenizer)

    def add_embedding_request(
        self, request_id: str, prompt: Prompt, pooling: Pooling = Pooling.MEAN, *, priority: int = 0
    ) -> None:
        """Admit a prompt that becomes a vector; its one output has `embedding`, not normalised.

        It is scheduled like any prompt: in chunks, beside requests that decode. It may fill the whole context.

        Raises:
            InvalidRequestError: names the field and the value; nothing of the request stays behind.
        """
        text, token_ids = self.encode_prompt(prompt)
        self.token_engine.add_embedding_request(request_id, token_ids, pooling, priority=priority)
        kind = RequestOutputKind.FINAL_ONLY
        self._processor.add_request(request_id, text, list(token_ids), EMBEDDING_PARAMS, kind, None)

    def abort_request(self, request_id: str) -> bool:
        """Stop a request; whether it was live. No further output of it appears. Idempotent."""
        return self.token_engine.finish(self._processor.remove_request(request_id), FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """Run one step and return what changed. A broken step ends its requests with an error, not the engine."""
        processed = self._processor.process(self.token_engine.step())
        self.token_engine.finish(processed.to_finish, FinishReason.STOP)
        return processed.outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return self.token_engine.has_unfinished_requests()

    def stats(self) -> EngineStats:
        """A snapshot for health checks and the live page."""
        return self.token_engine.stats()

    @property
    def startup(self) -> StartupReport:
        return self.token_engine.startup

    @property
    def is_asleep(self) -> bool:
        return self.token_engine.is_asleep

    def sleep(self, level: int = 1) -> None:
        """See `TokenEngine.sleep`."""
        self.token_engine.sleep(level)

    def wake(self) -> None:
        """See `TokenEngine.wake`."""
        self.token_engine.wake()

    def reload_weights(self) -> None:
        """See `TokenEngine.reload_weights`."""
        self.token_engine.reload_weights()

    def close(self) -> None:
        """Give graphs and pages back. Idempotent."""
        self.token_engine.close()

    def encode_prompt(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        """The prompt's text (None when it came as ids) and its token ids.

        Raises:
            InvalidRequestError: empty, of the wrong type, or text without a tokenizer.
        """
        if isinstance(prompt, Mapping):
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt")  # type: ignore[assignment]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError("prompt", prompt, "the engine has no tokenizer: give token ids")
            ids = tuple(self.tokenizer.encode(prompt))
            text: str | None = prompt
        elif isinstance(prompt, Sequence):
            ids, text = tuple(prompt), None  # type: ignore[arg-type]
        else:
            raise InvalidRequestError("prompt", prompt, "must be text or a list of token ids")
        if not ids:
            raise InvalidRequestError("prompt", prompt, "must not be empty")
        return text, ids
