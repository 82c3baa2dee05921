"""Token ids in, token ids out: the engine core with a door in front. No text, so it needs no tokenizer to run."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.errors import EngineDeadError, EngineStateError, GraphCheckError, InvalidRequestError
from graphrunner.core.outputs import EngineOutput, StepRecord
from graphrunner.core.pooling import Pooling
from graphrunner.core.request import FinishReason, Request
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.sleep_level import SleepLevel
from graphrunner.core.startup_report import StartupReport
from graphrunner.engine.sequence_ids import sequence_ids, sequence_seeds

if TYPE_CHECKING:
    from graphrunner.engine.engine_core import EngineCore
    from graphrunner.engine.residency import Residency
    from graphrunner.sampling.structured_output import StructuredOutputCompiler
    from graphrunner.telemetry.chrome_trace import TraceFile
    from graphrunner.telemetry.request_trace import RequestTrace
    from graphrunner.telemetry.step_trace import StepTrace

NUM_SHOWN_STEPS = 300
EMBEDDING_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)  # nothing is sampled


class TokenEngine:
    """Checks and resolves requests, and runs the steps. Not thread-safe.

    Args:
        core: the loop's body.
        residency: what it holds on the device.
        startup: what the start took.
        structured: compiles grammars; None when the engine has no tokenizer.
        step_trace: the account of steps.
        trace_file: written at `close`; None writes none.
        max_model_len: context limit, tokens.
        vocab_size: token ids go from 0 to vocab_size - 1.
        eos_token_ids: ids that end a request unless `ignore_eos`.
        has_tokenizer: whether somebody can spell the outputs; stop strings need that.
        seed: seeds the seeds of requests that bring none.

    Attributes:
        check_error: what the graph check found; offline generation takes and raises it.
    """

    def __init__(
        self,
        core: EngineCore,
        residency: Residency,
        *,
        startup: StartupReport,
        structured: StructuredOutputCompiler | None,
        step_trace: StepTrace,
        trace_file: TraceFile | None = None,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        has_tokenizer: bool,
        model_name: str,
        seed: int = 0,
    ) -> None:
        self.core = core
        self.startup = startup
        self._residency = residency
        self.step_trace = step_trace
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.model_name = model_name
        self._trace_file = trace_file
        self.check_error: GraphCheckError | None = None
        self._structured = structured
        self._eos_token_ids = eos_token_ids
        self._has_tokenizer = has_tokenizer
        self._random = random.Random(seed)
        self._num_output_tokens = 0
        self._interrupted: list[EngineOutput] = []  # ended by an interrupt, told at the next step

    def prepare(self, params: SamplingParams) -> Future[object] | None:
        """Begin what a request needs before it can be added, off the step; None when it needs nothing.

        Without it `add_request` does the same and waits. Raises (from the future) what `add_request` will.
        """
        if params.structured_output is None or self._structured is None:
            return None
        return self._structured.compile(params.structured_output)  # type: ignore[return-value]

    def add_request(
        self, request_id: str, token_ids: tuple[int, ...], params: SamplingParams, *, priority: int = 0
    ) -> None:
        """Admit a request as `params.n` sequences that share the prompt's pages; see `sequence_ids`.

        Raises:
            InvalidRequestError: names the field and the value; nothing of the request stays behind.
            EngineStateError: the engine is asleep or closed.
        """
        self._residency.check_ready()
        self._check(token_ids, params)
        admitted: list[str] = []
        try:
            for sequence in self._sequences(request_id, token_ids, params, priority):
                self.core.add_request(sequence)
                admitted.append(sequence.request_id)
                if self._requests is not None:
                    self._requests.arrived(sequence.request_id, len(token_ids))
        except Exception:
            self.finish(admitted, FinishReason.ABORT)
            raise

    def add_embedding_request(
        self, request_id: str, token_ids: tuple[int, ...], pooling: Pooling, *, priority: int = 0
    ) -> None:
        """Admit a prompt that becomes a vector; it may fill the whole context. Errors as `add_request`."""
        self._residency.check_ready()
        self._check_ids(token_ids)
        self.core.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=token_ids,
                sampling_params=EMBEDDING_PARAMS,
                max_new_tokens=1,
                priority=priority,
                arrival_s=time.monotonic(),
                pooling=pooling,
            )
        )

    def finish(self, sequences: Sequence[str], reason: FinishReason) -> bool:
        """End sequences from outside (abort, stop string); whether one was live. Idempotent."""
        if self._requests is not None:
            for sequence in sequences:
                self._requests.ended(sequence, reason.value)
        was_live = [self.core.finish_request(sequence, reason) for sequence in sequences]
        return any(was_live)

    def step(self) -> list[EngineOutput]:
        """Run one step and return what it adds. A broken step ends its requests with an error, not the engine.

        Raises:
            EngineDeadError: the device gave up, and with it every step that could follow.
            EngineStateError: the engine is closed.
        """
        self._residency.check_open()
        try:
            outputs, self._interrupted = self._interrupted + self.core.step(), []
        except Exception as cause:
            if isinstance(cause, GraphCheckError):
                self.check_error = cause
            outputs = self.core.fail_running(cause)
            if _is_device_lost(cause):
                raise EngineDeadError(f"the device is lost: {str(cause).strip().partition(chr(10))[0]}") from cause
        except BaseException as cause:  # Ctrl-C in the middle: nobody can say which half of the step has run
            self._interrupted += self.core.fail_running(cause)
            raise
        if self._requests is not None:
            self._requests.took(outputs)
        for output in outputs:
            self._num_output_tokens += len(output.new_token_ids)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._interrupted) or self.core.has_unfinished_requests()

    def stats(self) -> EngineStats:
        """A snapshot for health checks and the live page, with the last steps."""
        return self._stats_of(self.step_trace.records[-NUM_SHOWN_STEPS:])

    def stats_since(self, step_id: int) -> EngineStats:
        """A snapshot with the steps after `step_id` only."""
        full = self.stats()
        return replace(full, steps=tuple(step for step in full.steps if step.step_id > step_id))

    @property
    def is_asleep(self) -> bool:
        """Whether `wake` must be called before requests are taken."""
        return self._residency.is_asleep

    def sleep(self, level: int = 1) -> None:
        """Give KV pages and graphs back, and the weights: 1 moves them to host memory, 2 drops them.

        The prefix cache is empty afterwards. Asleep already: nothing happens.

        Raises:
            InvalidRequestError: there is no such level.
            EngineStateError: requests are waiting or running.
        """
        try:
            chosen = SleepLevel(level)
        except ValueError:
            raise InvalidRequestError("level", level, "must be 1 (keep weights in host memory) or 2 (drop)") from None
        self._require_idle("sleep")
        self._residency.sleep(chosen)
        self.core.scheduler.forget_prefixes()

    def wake(self) -> None:
        """Restore what `sleep` gave back: weights, then graphs, recorded anew, then pages. Awake: nothing happens.

        Raises:
            EngineStateError: the device has not the memory any more; the engine is still asleep.
            ModelLoadError: dropped weights cannot be read again; the engine is still asleep.
        """
        self._residency.wake()

    def reload_weights(self) -> None:
        """Read the checkpoint again, into the same memory: graphs stay valid, the prefix cache is emptied.

        Raises:
            EngineStateError: requests are waiting or running, or the engine is asleep.
            ModelLoadError: it cannot be read; requests are refused until a reload succeeds.
        """
        self._require_idle("reload weights")
        self._residency.reload_weights()
        self.core.scheduler.forget_prefixes()

    def close(self) -> None:
        """Give graphs and pages back, and write the trace. Idempotent."""
        if self._trace_file is not None:
            self._trace_file.write()
            self._trace_file = None
        self._residency.close()
        if self._structured is not None:
            self._structured.close()

    def _require_idle(self, what: str) -> None:
        self._residency.check_open()
        stats = self.core.scheduler.stats()
        if stats.num_running or stats.num_waiting:
            counts = f"{stats.num_running} requests run and {stats.num_waiting} wait"
            raise EngineStateError(f"cannot {what} while {counts}: let them finish, or abort them")
        if self.core.has_unfinished_requests():  # a step in flight, whose requests were all ended from outside
            self._interrupted += self.core.step()

    @property
    def _requests(self) -> RequestTrace | None:
        return None if self._trace_file is None else self._trace_file.requests

    def _stats_of(self, steps: Sequence[StepRecord]) -> EngineStats:
        queue = self.core.scheduler.stats()
        num_graph = sum(step.is_graph for step in steps)
        graphs = self.core.model_runner.graph_report().keys
        num_drafts = sum(step.num_drafts for step in steps)
        num_accepted = sum(step.num_accepted for step in steps)
        num_rounds = sum(len(step.accepted_lengths) for step in steps)
        return EngineStats(
            steps=tuple(steps),
            num_running=queue.num_running,
            num_waiting=queue.num_waiting,
            num_used_pages=queue.num_used_pages,
            num_pages=queue.num_used_pages + queue.num_free_pages + queue.num_evictable_pages,
            tokens_per_s=_tokens_per_s(steps),
            graph_coverage=num_graph / len(steps) if steps else 0.0,
            draft_acceptance=num_accepted / num_drafts if num_drafts else None,
            mean_accepted_length=num_accepted / num_rounds if num_rounds else None,
            num_preemptions=queue.num_preemptions,
            num_cached_pages=queue.num_evictable_pages,
            num_output_tokens=self._num_output_tokens,
            num_graphs=len(graphs),
            graph_memory_bytes=sum(graph.stats.memory_bytes for graph in graphs),
        )

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
        if params.stop_strings and not self._has_tokenizer:
            raise InvalidRequestError("stop", params.stop, "the engine has no tokenizer")

    def _check_ids(self, token_ids: tuple[int, ...]) -> None:
        if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < self.vocab_size:
            return
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidRequestError("prompt", token_id, "token ids must be integers")
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError("prompt", token_id, f"token ids go from 0 to {self.vocab_size - 1}")

    def _sequences(
        self, request_id: str, token_ids: tuple[int, ...], params: SamplingParams, priority: int
    ) -> list[Request]:
        room = self.max_model_len - len(token_ids)
        seed = self._random.getrandbits(62) if params.seed is None else params.seed
        now_s = time.monotonic()
        return [
            Request(
                request_id=sequence_id,
                prompt_token_ids=token_ids,
                sampling_params=params,
                max_new_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                eos_token_ids=self._eos_token_ids,
                seed=sequence_seed,
                priority=priority,
                arrival_s=now_s,
            )
            for sequence_id, sequence_seed in zip(
                sequence_ids(request_id, params.n), sequence_seeds(seed, params.n), strict=True
            )
        ]


def _is_device_lost(cause: BaseException) -> bool:
    """Whether nothing can run in this process any more: after such an error CUDA answers every call with it."""
    return "CUDA error" in str(cause)


def _tokens_per_s(steps: Sequence[StepRecord]) -> float:
    """Tokens computed a second over the given steps."""
    if not steps:
        return 0.0
    span_s = steps[-1].start_s + steps[-1].duration_ms / 1e3 - steps[0].start_s
    return sum(step.num_tokens for step in steps) / span_s if span_s > 0 else 0.0
