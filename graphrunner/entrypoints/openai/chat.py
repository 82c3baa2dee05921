"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from graphrunner.core.outputs import CompletionOutput
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
from graphrunner.entrypoints.openai.streaming import EventStream, unless_disconnected
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
    generation = await server.start_generation(job.request_id, [prompt_ids], params, body.priority, "messages")
    if body.stream:
        on_gone = server.metrics.disconnects.inc
        return EventStream(_chunks(generation, job), close=generation.aclose, on_gone=on_gone)
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


async def _chunks(generation: Generation, job: ChatJob) -> AsyncGenerator[ChatChunk, None]:
    """The role of each choice, its pieces, its finish reason; the usage last, when asked for."""
    usage = None if job.body.is_usage_streamed else UNSET

    def chunk(choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(job.request_id, "chat.completion.chunk", job.created, job.model, choices, usage)

    for index in range(job.num_choices):
        yield chunk([ChunkChoice(index, Delta(role="assistant", content=""))])
    parsers = [job.reply_format.parser() for _ in range(job.num_choices)]
    async for _, output in generation.outputs():
        job.usage.add(0, output)
        for each in output.outputs:
            parser = parsers[each.index]
            part = parser.feed(each.text, is_last=each.finish_reason is not None)
            logprobs = _logprobs(job, each)
            if part or logprobs:
                yield chunk([ChunkChoice(each.index, _delta(part), logprobs)])
            if each.finish_reason is not None:
                reason = _finish_reason(each.finish_reason, parser)
                yield chunk([ChunkChoice(each.index, Delta(), finish_reason=reason)])
    if job.body.is_usage_streamed:
        last = chunk([])
        last.usage = job.usage.usage()
        yield last


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
    async for _, output in generation.outputs():
        job.usage.add(0, output)
        for each in output.outputs:
            choice = choices[each.index]
            choice.add(choice.parser.feed(each.text, is_last=each.finish_reason is not None))
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
