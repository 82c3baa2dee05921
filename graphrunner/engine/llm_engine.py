"""Prompts in, text out: the engine core with a door in front and a voice behind.

The door checks and resolves a request (`admit`), the voice turns token ids into `RequestOutput`s.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.outputs import RequestOutput, StepRecord
from graphrunner.core.pooling import Pooling
from graphrunner.core.request import FinishReason, Request
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.engine.engine_core import EngineCore
from graphrunner.engine.output_processor import OutputProcessor, RequestOutputKind

if TYPE_CHECKING:
    from graphrunner.sampling.structured_output import StructuredOutputCompiler
    from graphrunner.telemetry.chrome_trace import TraceFile
    from graphrunner.telemetry.metrics import EngineMetrics
    from graphrunner.telemetry.request_trace import RequestTrace
    from graphrunner.telemetry.step_trace import StepTrace
    from graphrunner.tokenizer.tokenizer import Tokenizer

_NUM_SHOWN_STEPS = 300
_EMBEDDING_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)  # nothing is sampled

Prompt = str | Sequence[int] | Mapping[str, object]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""


class LLMEngine:
    """A whole engine, driven by whoever calls `step`. Not thread-safe.

    Args:
        core: the loop's body.
        tokenizer: None when the engine was started without one.
        processor: makes `RequestOutput`s.
        structured: compiles grammars; None when the engine has no tokenizer.
        step_trace, metrics: the account of steps.
        trace_file: written at `close`; None writes none.
        max_model_len: context limit, tokens.
        vocab_size: token ids go from 0 to vocab_size - 1.
        eos_token_ids: ids that end a request unless `ignore_eos`.
        seed: seeds the seeds of requests that bring none.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        tokenizer: Tokenizer | None,
        processor: OutputProcessor,
        structured: StructuredOutputCompiler | None,
        step_trace: StepTrace,
        metrics: EngineMetrics,
        trace_file: TraceFile | None = None,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        model_name: str,
        seed: int = 0,
    ) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self.step_trace = step_trace
        self.metrics = metrics
        self._trace_file = trace_file
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.model_name = model_name
        self._processor = processor
        self._structured = structured
        self._eos_token_ids = eos_token_ids
        self._random = random.Random(seed)

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
        self._check(token_ids, params)
        children = self._children(request_id, token_ids, params, priority)
        self._processor.add_request(request_id, text, list(token_ids), params, output_kind, self.tokenizer)
        admitted: list[str] = []
        try:
            for child in children:
                self.core.add_request(child)
                admitted.append(child.request_id)
                if self._requests is not None:
                    self._requests.arrived(child.request_id, len(token_ids))
        except Exception:
            for child_id in admitted:
                self._finish(child_id, FinishReason.ABORT)
            self._processor.remove_request(request_id)
            raise

    def add_embedding_request(
        self, request_id: str, prompt: Prompt, pooling: Pooling = Pooling.MEAN, *, priority: int = 0
    ) -> None:
        """Admit a prompt that becomes a vector; its one output has `embedding`, not normalised.

        It is scheduled like any prompt: in chunks, beside requests that decode. It may fill the whole context.

        Raises:
            InvalidRequestError: names the field and the value; nothing of the request stays behind.
        """
        text, token_ids = self.encode_prompt(prompt)
        self._check_ids(token_ids)
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=_EMBEDDING_PARAMS,
            max_new_tokens=1,
            priority=priority,
            arrival_s=time.monotonic(),
            pooling=pooling,
        )
        kind = RequestOutputKind.FINAL_ONLY
        self._processor.add_request(request_id, text, list(token_ids), _EMBEDDING_PARAMS, kind, None)
        try:
            self.core.add_request(request)
        except Exception:
            self._processor.remove_request(request_id)
            raise

    def abort_request(self, request_id: str) -> bool:
        """Stop a request; whether it was live. No further output of it appears. Idempotent."""
        child_ids = self._processor.remove_request(request_id)
        was_live = [self._finish(child_id, FinishReason.ABORT) for child_id in child_ids]
        return any(was_live)

    def step(self) -> list[RequestOutput]:
        """Run one step and return what changed. A broken step ends its requests with an error, not the engine."""
        try:
            outputs = self.core.step()
        except Exception as cause:
            outputs = self.core.fail_running(cause)
        if self._requests is not None:
            self._requests.took(outputs)
        processed = self._processor.process(outputs)
        for child_id in processed.to_finish:
            self._finish(child_id, FinishReason.STOP)
        return processed.outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return self.core.has_unfinished_requests()

    def stats(self) -> EngineStats:
        """A snapshot for health checks and the live page."""
        queue = self.core.scheduler.stats()
        steps = tuple(self.step_trace.records[-_NUM_SHOWN_STEPS:])
        num_graph = sum(step.is_graph for step in steps)
        return EngineStats(
            steps=steps,
            num_running=queue.num_running,
            num_waiting=queue.num_waiting,
            num_used_pages=queue.num_used_pages,
            num_pages=queue.num_used_pages + queue.num_free_pages + queue.num_evictable_pages,
            tokens_per_s=_tokens_per_s(steps),
            graph_coverage=num_graph / len(steps) if steps else 0.0,
            num_preemptions=queue.num_preemptions,
        )

    def close(self) -> None:
        """Give graphs and pages back, and write the trace. Idempotent."""
        if self._trace_file is not None:
            self._trace_file.write()
            self._trace_file = None
        self.core.model_runner.close()
        if self._structured is not None:
            self._structured.close()

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

    @property
    def _requests(self) -> RequestTrace | None:
        return None if self._trace_file is None else self._trace_file.requests

    def _finish(self, child_id: str, reason: FinishReason) -> bool:
        if self._requests is not None:
            self._requests.ended(child_id, reason.value)
        return self.core.finish_request(child_id, reason)

    def _check(self, token_ids: tuple[int, ...], params: SamplingParams) -> None:
        self._check_ids(token_ids)
        if len(token_ids) >= self.max_model_len:
            problem = f"the context limit max_model_len={self.max_model_len} leaves no room for an output token"
            raise InvalidRequestError("prompt", f"{len(token_ids)} tokens", problem)
        params.check_vocab(self.vocab_size)
        if params.structured_output is not None:
            if self._structured is None:
                raise InvalidRequestError("structured_output", params.structured_output, "the engine has no tokenizer")
            self._structured.compile(params.structured_output).result()  # a bad grammar is refused here
        if params.stop_strings and self.tokenizer is None:
            raise InvalidRequestError("stop", params.stop, "the engine has no tokenizer")

    def _check_ids(self, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidRequestError("prompt", token_id, "token ids must be integers")
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError("prompt", token_id, f"token ids go from 0 to {self.vocab_size - 1}")

    def _children(
        self, request_id: str, token_ids: tuple[int, ...], params: SamplingParams, priority: int
    ) -> list[Request]:
        room = self.max_model_len - len(token_ids)
        seed = self._random.getrandbits(62) if params.seed is None else params.seed
        now_s = time.monotonic()
        return [
            Request(
                request_id=child_id,
                prompt_token_ids=token_ids,
                sampling_params=params,
                max_new_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                eos_token_ids=self._eos_token_ids,
                seed=child_seed,
                priority=priority,
                arrival_s=now_s,
            )
            for child_id, child_seed in self._processor.child_ids(request_id, params.n, seed)
        ]


def _tokens_per_s(steps: Sequence[StepRecord]) -> float:
    """Tokens computed a second over the given steps."""
    if not steps:
        return 0.0
    span_s = steps[-1].start_s + steps[-1].duration_ms / 1e3 - steps[0].start_s
    return sum(step.num_tokens for step in steps) / span_s if span_s > 0 else 0.0
