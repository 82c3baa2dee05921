"""`LLM`: offline generation, in the names people know from vLLM."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from graphrunner.config.options import engine_config_from_options
from graphrunner.core.errors import EmbeddingFailedError, InvalidRequestError
from graphrunner.core.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput, StepRecord
from graphrunner.core.pooling import Pooling, unit_vector
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.startup_report import StartupReport
from graphrunner.engine.build import build_engine
from graphrunner.engine.llm_engine import Prompt
from graphrunner.engine.output_processor import RequestOutputKind
from graphrunner.runner.graph_account import GraphReport

Message = Mapping[str, Any]


class LLM:
    """A model, loaded and ready.

    Args:
        model: hub id, folder of safetensors, or GGUF file; None is the embedded SmolLM2-135M-Instruct.
        options: any field of `graphrunner.config.engine_config` by its name (dtype, max_model_len, max_num_seqs,
            page_size or block_size, seed, gpu_memory_utilization, enable_prefix_caching, load_format, ...).
            `prompts_first` is on unless said otherwise.

    Raises:
        ConfigError, ModelLoadError: one line that names the setting or the file.
    """

    def __init__(self, model: str | None = None, **options: object) -> None:
        config = engine_config_from_options({"model": model, **options})
        if config.scheduler.prompts_first is None:
            config = replace(config, scheduler=replace(config.scheduler, prompts_first=True))
        self.engine = build_engine(config)
        self._ids = (f"request-{number}" for number in itertools.count())
        self._streams: dict[str, deque[RequestOutput]] = {}  # what steps made for streams that did not ask for them

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt, batched continuously, and return in the order given.

        Args:
            prompts: text or {"prompt_token_ids": [...]}, one or a list.
            sampling_params: one for all, or one each; None is the defaults.
            use_tqdm: show a progress bar.

        Raises:
            InvalidRequestError: a prompt or its parameters; no request of the call has run then.
        """
        batch = _as_list(prompts)
        params = _one_each(sampling_params, len(batch))

        def admit(index: int, request_id: str) -> None:
            kind = RequestOutputKind.FINAL_ONLY
            self.engine.add_request(request_id, batch[index], params[index], output_kind=kind)

        return self._run(len(batch), admit, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "mean",
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for every prompt: its hidden states after the model's final norm, pooled.

        Args:
            prompts: as for `generate`; a prompt may fill the whole context.
            pooling: "mean" of all tokens, or the "last" one.
            normalize: scale to length 1.

        Raises:
            InvalidRequestError: a prompt, or `pooling`; nothing of the call has run then.
            EmbeddingFailedError: the model gave no usable vector.
        """
        batch = _as_list(prompts)
        try:
            kind = Pooling(pooling)
        except ValueError:
            raise InvalidRequestError("pooling", pooling, "must be mean or last") from None

        def admit(index: int, request_id: str) -> None:
            self.engine.add_embedding_request(request_id, batch[index], kind)

        return [_embedded(output, normalize) for output in self._run(len(batch), admit, use_tqdm)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next turn of one conversation or of several; see `generate`."""
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [self.chat_prompt(each, add_generation_prompt, tools) for each in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield what each step adds; closing the iterator early aborts the request.

        Several streams may be open, and `generate` called between: all of them are served by the same steps. A stream
        then waits for prompts that fill steps; where that matters, make the `LLM` with `prompts_first=False`.
        """
        (params,) = _one_each(sampling_params, 1)
        request_id = next(self._ids)
        self.engine.add_request(request_id, prompt, params, output_kind=RequestOutputKind.DELTA)
        made = self._streams[request_id] = deque()
        try:
            while request_id in self._streams and (made or self.engine.has_unfinished_requests()):
                if not made:
                    self._step()
                    continue
                output = made.popleft()
                if output.finished:
                    del self._streams[request_id]
                yield output
        finally:
            if request_id in self._streams:
                self.abort(request_id)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, list[int]]:
        """The token ids of a conversation under the model's own chat template."""
        if self.engine.tokenizer is None:
            raise InvalidRequestError("messages", len(messages), "the engine has no tokenizer")
        ids = self.engine.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tools=tools
        )
        return {"prompt_token_ids": ids}

    def abort(self, request_id: str) -> bool:
        """Stop a request; whether it was live. A stream of it ends without a further output."""
        self._streams.pop(request_id, None)
        return self.engine.abort_request(request_id)

    def get_tokenizer(self) -> object:
        """The tokenizer, or None."""
        return self.engine.tokenizer

    @property
    def steps(self) -> list[StepRecord]:
        """The last steps: runner, key, padding, and why no graph ran."""
        return self.engine.step_trace.records

    def graph_report(self) -> GraphReport:
        """Per runner and key: capture time, memory, replays, padding; and the misses by reason."""
        return self.engine.core.model_runner.graph_report()

    def startup_report(self) -> StartupReport:
        """Time and memory of each phase of the start."""
        return self.engine.startup

    @property
    def is_asleep(self) -> bool:
        """Whether `wake` must be called before anything can be generated."""
        return self.engine.is_asleep

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back until `wake`: KV pages, graphs, and the weights.

        Args:
            level: 1 moves the weights to host memory, 2 drops them: `wake` reads the checkpoint again.

        Raises:
            EngineStateError: requests are waiting or running.
        """
        self.engine.sleep(level)

    def wake(self) -> None:
        """Restore what `sleep` gave back; the same prompts have the same answers. See `TokenEngine.wake`."""
        self.engine.wake()

    def reload_weights(self) -> None:
        """Read the checkpoint again, in place, and empty the prefix cache. See `TokenEngine.reload_weights`."""
        self.engine.reload_weights()

    def close(self) -> None:
        """Give memory back. Idempotent; generating afterwards is an EngineStateError."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, num_requests: int, admit: Callable[[int, str], None], is_shown: bool) -> list[RequestOutput]:
        """Admit requests by index and step until all have ended; nothing of them stays behind when one is refused."""
        request_ids = [next(self._ids) for _ in range(num_requests)]
        try:
            for index, request_id in enumerate(request_ids):
                admit(index, request_id)
            finished = {output.request_id: output for output in self._drain(num_requests, is_shown)}
        except BaseException:
            for request_id in request_ids:
                self.engine.abort_request(request_id)
            raise
        return [finished[request_id] for request_id in request_ids]

    def _step(self) -> list[RequestOutput]:
        """Run one step; outputs of open streams go to them, the others come back."""
        others = []
        for output in self.engine.step():
            if output.request_id in self._streams:
                self._streams[output.request_id].append(output)
            else:
                others.append(output)
        tokens = self.engine.token_engine
        if tokens.check_error is not None:
            error, tokens.check_error = tokens.check_error, None
            raise error
        return others

    def _drain(self, num_requests: int, is_shown: bool) -> Iterator[RequestOutput]:
        """Step until everything admitted has ended, under a progress bar."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(
            *columns, disable=not (is_shown and console.is_terminal), transient=True, console=console
        ) as progress:
            task = progress.add_task("generating", total=num_requests)
            while self.engine.has_unfinished_requests():
                for output in self._step():
                    if output.finished:
                        progress.advance(task)
                        yield output


def _embedded(output: RequestOutput, is_normalized: bool) -> EmbeddingRequestOutput:
    """A finished embedding request as the caller sees it."""
    raw = output.embedding
    if raw is None:
        raise EmbeddingFailedError(f"{output.request_id}: {output.outputs[0].stop_reason}")
    vector = unit_vector(raw) if is_normalized else list(raw)
    if vector is None:
        raise EmbeddingFailedError(f"{output.request_id}: the model gave a vector without a direction")
    return EmbeddingRequestOutput(output.request_id, output.prompt_token_ids, EmbeddingOutput(vector))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as many. A flat list of ints is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError("prompts", prompts, "must be text, token ids, or a list of them")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)) or not all(isinstance(each, SamplingParams) for each in params):
        raise InvalidRequestError("sampling_params", params, "must be a SamplingParams, or a list of them")
    if len(params) != count:
        raise InvalidRequestError("sampling_params", f"{len(params)} given", f"one each is needed for {count} prompts")
    return list(params)
