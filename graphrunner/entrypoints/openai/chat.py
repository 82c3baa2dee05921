"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from graphrunner.core.outputs import CompletionOutput, RequestOutput
from graphrunner.entrypoints.openai.generation import Generation, UsageCount, new_request_id
from graphrunner.entrypoints.openai.logprobs import chat_logprobs
from graphrunner.entrypoints.openai.protocol import ChatBody
from graphrunner.entrypoints.openai.reply_parser import THINK_OPEN, ReplyFormat, ReplyParser, ReplyPart
from graphrunner.entrypoints.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Delta,
    FunctionCall,
    TokenLogprob,
    ToolCall,
)
from graphrunner.entrypoints.openai.sampling import called_name, chat_sampling
from graphrunner.entrypoints.openai.server import Server
from graphrunner.entrypoints.openai.server_options import ReasoningFormat
from graphrunner.entrypoints.openai.streaming import (
    DONE,
    EventStream,
    TextEvent,
    event,
    failure_events,
    unless_disconnected,
)
from graphrunner.entrypoints.openai.tool_calls import ToolDelta, ToolFormat

_PROMPT_TAIL_LEN = 8  # tokens that hold an opening think tag at the end of a prompt


@dataclass(frozen=True, slots=True)
class ChatJob:
    """One checked request and how its reply is read."""

    request_id: str
    model: str
    created: int
    body: ChatBody
    reply_format: ReplyFormat
    usage: UsageCount
    num_choices: int


async def create_chat_completion(server: Server, request: Request) -> Response:
    """Answer at once or stream. Raises what `errors.api_error_from` knows."""
    body = await server.read(request, ChatBody)
    body.check()
    server.check_ready()
    server.check_model(body.model)
    params = chat_sampling(body)
    tools = None if body.tool_choice == "none" else body.tools
    prompt_ids = await server.encoder.encode_chat(body.messages, tools)
    job = ChatJob(
        request_id=new_request_id("chatcmpl"),
        model=server.model_name,
        created=int(time.time()),
        body=body,
        reply_format=await reply_format_of(server, body, prompt_ids),
        usage=UsageCount([len(prompt_ids)]),
        num_choices=params.n,
    )
    generation = await server.start_generation(
        job.request_id, [prompt_ids], params, body.priority, "messages", is_streamed=body.stream is True
    )
    if body.stream:
        return EventStream(generation, ChatEvents(job), on_gone=server.metrics.disconnects.inc)
    try:
        completion = await unless_disconnected(request.receive, _whole(generation, job))
    finally:
        await generation.aclose()
    return Response(msgspec.json.encode(completion), media_type="application/json")


async def reply_format_of(server: Server, body: ChatBody, prompt_ids: list[int]) -> ReplyFormat:
    """How the reply to a prompt is to be read."""
    has_reasoning = server.options.reasoning is ReasoningFormat.AUTO
    is_thinking = False
    if has_reasoning:
        tail = await server.encoder.decode(prompt_ids[-_PROMPT_TAIL_LEN:], "messages")
        is_thinking = tail.rstrip().endswith(THINK_OPEN)
    tool_format = ToolFormat(server.options.tool_call_format.value)
    if body.tool_choice == "required":
        tool_format = ToolFormat.LIST
    elif not body.tools or body.tool_choice == "none":
        tool_format = ToolFormat.NONE
    return ReplyFormat(
        has_reasoning=has_reasoning,
        is_thinking=is_thinking,
        tool_format=tool_format,
        tool_names=frozenset(tool.function.name for tool in body.tools or ()),
        forced_name=called_name(body),
        has_parallel_calls=body.parallel_tool_calls is not False,
    )


def _finish_reason(reason: str | None, parser: ReplyParser) -> str | None:
    return "tool_calls" if reason == "stop" and parser.has_calls else reason


def _logprobs(job: ChatJob, output: CompletionOutput) -> ChatLogprobs | None:
    if not job.body.logprobs or not output.token_ids:
        return None
    return chat_logprobs(output.token_ids, output.logprobs or [], job.body.top_logprobs or 0)


# -- streamed -------------------------------------------------------------------------------------------------------


class ChatEvents:
    """The role of each choice, its pieces, its finish reason; the usage last, when asked for. See `ReplyEvents`."""

    def __init__(self, job: ChatJob) -> None:
        self._job = job
        self._usage = None if job.body.is_usage_streamed else UNSET
        self._parsers = [job.reply_format.parser() for _ in range(job.num_choices)]
        self._text_events = [TextEvent(self._text_chunk(index)) for index in range(job.num_choices)]

    def first(self) -> bytes:
        """Who speaks."""
        roles = [ChunkChoice(index, Delta(role="assistant", content="")) for index in range(self._job.num_choices)]
        return b"".join([event(self._chunk([role])) for role in roles])

    def take(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The pieces that one step added."""
        self._job.usage.add(prompt_index, output)
        if len(output.outputs) == 1:
            return self._pieces(output.outputs[0])
        return b"".join([self._pieces(each) for each in output.outputs])

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

    def _pieces(self, output: CompletionOutput) -> bytes:
        parser, index, is_last = self._parsers[output.index], output.index, output.finish_reason is not None
        if parser.is_plain and not is_last and not self._job.body.logprobs:
            return self._text_events[index](output.text) if output.text else b""
        part = parser.feed(output.text, is_last=is_last)
        logprobs = _logprobs(self._job, output)
        data = b""
        if part or logprobs:
            data = event(self._chunk([ChunkChoice(index, _delta(part), logprobs)]))
        if is_last:
            reason = _finish_reason(output.finish_reason, parser)
            data += event(self._chunk([ChunkChoice(index, Delta(), finish_reason=reason)]))
        return data

    def _text_chunk(self, index: int) -> Callable[[str], ChatChunk]:
        return lambda text: self._chunk([ChunkChoice(index, Delta(content=text))])

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        job = self._job
        return ChatChunk(job.request_id, "chat.completion.chunk", job.created, job.model, choices, self._usage)


def _delta(part: ReplyPart) -> Delta:
    return Delta(
        content=part.content or UNSET,
        reasoning_content=part.reasoning or UNSET,
        tool_calls=[_streamed_call(piece) for piece in part.tool_deltas] or UNSET,
    )


def _streamed_call(piece: ToolDelta) -> ToolCall:
    if piece.name is None:
        return ToolCall(index=piece.index, function=FunctionCall(arguments=piece.arguments))
    function = FunctionCall(piece.name, piece.arguments)
    return ToolCall(piece.index, piece.call_id or UNSET, "function", function)


# -- whole ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Choice:
    """A choice being put together from its pieces."""

    parser: ReplyParser
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: dict[int, list[ToolDelta]] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = "stop"

    def add(self, part: ReplyPart) -> None:
        self.reasoning.append(part.reasoning)
        self.content.append(part.content)
        for piece in part.tool_deltas:
            self.calls.setdefault(piece.index, []).append(piece)

    def message(self) -> ChatMessage:
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        calls = [_whole_call(pieces) for _, pieces in sorted(self.calls.items())]
        return ChatMessage(
            role="assistant",
            content=None if calls and not content.strip() else content,
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )


async def _whole(generation: Generation, job: ChatJob) -> ChatCompletion:
    choices = [_Choice(job.reply_format.parser()) for _ in range(job.num_choices)]
    for output in await generation.finals():
        job.usage.add(0, output)
        for each in output.outputs:
            choice = choices[each.index]
            choice.add(choice.parser.feed(each.text, is_last=True))
            logprobs = _logprobs(job, each)
            choice.logprobs += logprobs.content if logprobs else []
            choice.finish_reason = _finish_reason(each.finish_reason, choice.parser) or choice.finish_reason
    answers = [
        ChatChoice(
            index, choice.message(), ChatLogprobs(choice.logprobs) if job.body.logprobs else None, choice.finish_reason
        )
        for index, choice in enumerate(choices)
    ]
    return ChatCompletion(job.request_id, "chat.completion", job.created, job.model, answers, job.usage.usage())


def _whole_call(pieces: list[ToolDelta]) -> ToolCall:
    function = FunctionCall(pieces[0].name or "", "".join(piece.arguments for piece in pieces))
    return ToolCall(id=pieces[0].call_id or "", type="function", function=function)
