"""/v1/completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from graphrunner.core.outputs import CompletionOutput, RequestOutput
from graphrunner.entrypoints.openai.generation import Generation, UsageCount, new_request_id
from graphrunner.entrypoints.openai.logprobs import Position, completion_logprobs, joined
from graphrunner.entrypoints.openai.prompts import EncodedPrompt, prompts_of
from graphrunner.entrypoints.openai.protocol import CompletionBody
from graphrunner.entrypoints.openai.responses import Completion, CompletionChoice, CompletionLogprobs
from graphrunner.entrypoints.openai.sampling import completion_sampling, is_score_only
from graphrunner.entrypoints.openai.server import Server
from graphrunner.entrypoints.openai.streaming import (
    DONE,
    EventStream,
    TextEvent,
    event,
    failure_events,
    unless_disconnected,
)


@dataclass(slots=True)
class _Choice:
    """A choice on its way out: what of it was sent or collected."""

    index: int
    echo: EncodedPrompt | None  # the prompt, until it went out
    next_offset: int = 0  # where the next token starts, characters
    prompt_positions: Sequence[Position] = ()


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """One checked request. Choice `prompt_index * n + output_index` is output `output_index` of that prompt."""

    request_id: str
    model: str
    created: int
    body: CompletionBody
    usage: UsageCount
    num_outputs: int
    choices: Sequence[_Choice]

    def reply(self, choices: list[CompletionChoice]) -> Completion:
        """A whole answer, or a chunk with one choice."""
        return Completion(self.request_id, "text_completion", self.created, self.model, choices)


async def create_completion(server: Server, request: Request) -> Response:
    """Answer at once or stream. Raises what `errors.api_error_from` knows."""
    body = await server.read(request, CompletionBody)
    body.check()
    server.check_ready()
    server.check_model(body.model)
    prompts = prompts_of(body.prompt, "prompt")
    params = completion_sampling(body)
    encoded = await server.encoder.encode(prompts, "prompt")
    if body.echo:
        encoded = [await _with_text(server, each) for each in encoded]
    job = CompletionJob(
        request_id=new_request_id("cmpl"),
        model=server.model_name,
        created=int(time.time()),
        body=body,
        usage=UsageCount([len(each.token_ids) for each in encoded]),
        num_outputs=params.n,
        choices=[
            _Choice(index, encoded[index // params.n] if body.echo else None)
            for index in range(len(encoded) * params.n)
        ],
    )
    token_ids = [each.token_ids for each in encoded]
    generation = await server.start_generation(
        job.request_id, token_ids, params, body.priority, "prompt", is_streamed=body.stream is True
    )
    if body.stream:
        return EventStream(generation, CompletionEvents(job), on_gone=server.metrics.disconnects.inc)
    try:
        completion = await unless_disconnected(request.receive, _whole(generation, job))
    finally:
        await generation.aclose()
    return Response(msgspec.json.encode(completion), media_type="application/json")


async def _with_text(server: Server, prompt: EncodedPrompt) -> EncodedPrompt:
    text = await server.encoder.decode(prompt.token_ids, "echo") if prompt.text is None else prompt.text
    return EncodedPrompt(text, prompt.token_ids, await server.encoder.decode(prompt.token_ids[:1], "echo"))


class CompletionEvents:
    """What is new of each choice; the usage last, when asked for. See `ReplyEvents`."""

    def __init__(self, job: CompletionJob) -> None:
        self._job = job
        self._usage = None if job.body.is_usage_streamed else UNSET
        self._is_plain = job.body.logprobs is None and not job.body.echo and not is_score_only(job.body)
        self._text_events = [TextEvent(self._text_chunk(choice.index)) for choice in job.choices]

    def first(self) -> bytes:
        """Nothing: the first piece is the first event."""
        return b""

    def take(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The pieces that one step added."""
        if not self._is_plain:
            return b"".join([event(self._chunk([piece])) for piece in _pieces(self._job, prompt_index, output)])
        self._job.usage.add(prompt_index, output)
        if len(output.outputs) == 1:
            return self._plain_piece(prompt_index, output.outputs[0])
        return b"".join([self._plain_piece(prompt_index, each) for each in output.outputs])

    def last(self) -> bytes:
        """The usage, and the last event."""
        if not self._job.body.is_usage_streamed:
            return DONE
        chunk = self._chunk([])
        chunk.usage = self._job.usage.usage()
        return event(chunk) + DONE

    def failed(self, error: Exception) -> bytes:
        """The error, and the last event."""
        return failure_events(error)

    def _plain_piece(self, prompt_index: int, output: CompletionOutput) -> bytes:
        index = prompt_index * self._job.num_outputs + output.index
        if output.finish_reason is not None:
            return event(self._chunk([CompletionChoice(index, output.text, None, output.finish_reason)]))
        return self._text_events[index](output.text) if output.text else b""

    def _text_chunk(self, index: int) -> Callable[[str], Completion]:
        return lambda text: self._chunk([CompletionChoice(index, text)])

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        chunk = self._job.reply(choices)
        chunk.usage = self._usage
        return chunk


async def _whole(generation: Generation, job: CompletionJob) -> Completion:
    texts: list[list[str]] = [[] for _ in job.choices]
    logprobs: list[list[CompletionLogprobs]] = [[] for _ in job.choices]
    reasons = ["stop"] * len(job.choices)
    for prompt_index, output in enumerate(await generation.finals()):
        for piece in _pieces(job, prompt_index, output):
            texts[piece.index].append(piece.text)
            if piece.logprobs is not None:
                logprobs[piece.index].append(piece.logprobs)
            reasons[piece.index] = piece.finish_reason or reasons[piece.index]
    has_logprobs = job.body.logprobs is not None
    completion = job.reply(
        [
            CompletionChoice(index, "".join(texts[index]), joined(logprobs[index]) if has_logprobs else None, reason)
            for index, reason in enumerate(reasons)
        ]
    )
    completion.usage = job.usage.usage()
    return completion


def _pieces(job: CompletionJob, prompt_index: int, output: RequestOutput) -> Iterator[CompletionChoice]:
    """What is new of each choice; the echoed prompt comes with the first piece."""
    if not is_score_only(job.body):
        job.usage.add(prompt_index, output)
    _keep_prompt_logprobs(job, prompt_index, output)
    for each in output.outputs:
        if not each.token_ids and each.finish_reason is None:
            continue  # only prompt chunks so far
        choice = job.choices[prompt_index * job.num_outputs + each.index]
        if choice.echo is not None:
            yield _echoed(job, choice, choice.echo)
        piece = _generated(job, choice, each)
        if piece is not None:
            yield piece


def _keep_prompt_logprobs(job: CompletionJob, prompt_index: int, output: RequestOutput) -> None:
    """They fill up while the prompt's chunks are computed, and are whole at the first token."""
    if output.prompt_logprobs is not None:
        for choice in job.choices[prompt_index * job.num_outputs :][: job.num_outputs]:
            choice.prompt_positions = output.prompt_logprobs


def _echoed(job: CompletionJob, choice: _Choice, prompt: EncodedPrompt) -> CompletionChoice:
    choice.echo = None
    choice.next_offset = len(prompt.text or "")
    logprobs = None
    if job.body.logprobs is not None:
        positions = choice.prompt_positions or [None] * len(prompt.token_ids)
        logprobs = completion_logprobs(prompt.token_ids, positions, job.body.logprobs, 0, prompt.first_text)
    return CompletionChoice(choice.index, prompt.text or "", logprobs)


def _generated(job: CompletionJob, choice: _Choice, output: CompletionOutput) -> CompletionChoice | None:
    if is_score_only(job.body):
        return CompletionChoice(choice.index, "", None, "length") if output.finish_reason else None
    logprobs = None
    if job.body.logprobs is not None and output.token_ids:
        logprobs = completion_logprobs(output.token_ids, output.logprobs or [], job.body.logprobs, choice.next_offset)
        choice.next_offset += sum(map(len, logprobs.tokens))
    if not output.text and logprobs is None and output.finish_reason is None:
        return None
    return CompletionChoice(choice.index, output.text, logprobs, output.finish_reason)
