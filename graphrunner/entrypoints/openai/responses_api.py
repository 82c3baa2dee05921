"""/v1/responses: create (whole or as events), retrieve, delete. Text in, text and function calls out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from graphrunner.core.errors import GraphRunnerError, InvalidRequestError
from graphrunner.core.outputs import CompletionOutput
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.entrypoints.openai.chat import reply_format_of
from graphrunner.entrypoints.openai.errors import ApiError, api_error_from, bad_request
from graphrunner.entrypoints.openai.generation import Generation, UsageCount, new_request_id
from graphrunner.entrypoints.openai.logprobs import chat_logprobs
from graphrunner.entrypoints.openai.protocol import ChatBody, Message
from graphrunner.entrypoints.openai.reply_parser import ReplyParser
from graphrunner.entrypoints.openai.response_store import StoredResponse
from graphrunner.entrypoints.openai.responses import TokenLogprob
from graphrunner.entrypoints.openai.responses_body import FunctionChoice, ResponsesBody
from graphrunner.entrypoints.openai.responses_builder import COMPLETED, IN_PROGRESS, INCOMPLETE, ResponseBuilder
from graphrunner.entrypoints.openai.responses_objects import (
    DeletedResponse,
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    TextFormat,
    TextSettings,
    ToolChoice,
    ToolSettings,
)
from graphrunner.entrypoints.openai.responses_request import chat_body_of, client_error, messages_of, reply_messages
from graphrunner.entrypoints.openai.sampling import chat_sampling
from graphrunner.entrypoints.openai.server import Server
from graphrunner.entrypoints.openai.streaming import EventStream, unless_disconnected
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)
FAILED = "failed"
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class ResponseJob:
    """One checked request on its way to a response.

    Attributes:
        earlier: the conversation before this request's input.
    """

    server: Server
    body: ResponsesBody
    earlier: Sequence[Message]
    response: ResponseObject
    builder: ResponseBuilder
    parser: ReplyParser
    usage: UsageCount
    finish_reason: str | None = None

    def feed(self, output: CompletionOutput) -> list[ResponseEvent]:
        """Take in what one step added."""
        part = self.parser.feed(output.text, is_last=output.finish_reason is not None)
        logprobs: list[TokenLogprob] = []
        if self.body.wants_logprobs and output.token_ids:
            logprobs = chat_logprobs(output.token_ids, output.logprobs or [], self.body.top_logprobs or 0).content
        events = list(self.builder.feed(part, len(output.token_ids), logprobs))
        self.finish_reason = output.finish_reason or self.finish_reason
        return events

    def finish(self) -> list[ResponseEvent]:
        """End the response and keep it, unless the client said not to; the last event holds it whole."""
        is_complete = self.finish_reason != "length"
        events = list(self.builder.finish(is_complete=is_complete))
        response = self.response
        response.output = self.builder.items
        response.status = COMPLETED if is_complete else INCOMPLETE
        response.incomplete_details = None if is_complete else IncompleteDetails("max_output_tokens")
        response.completed_at = int(time.time())
        response.usage = self._counted()
        if response.store:
            conversation = [*self.earlier, *messages_of(self.body.input), *reply_messages(response.output)]
            self.server.stored_responses.put(response.id, StoredResponse(_encode(response), conversation))
        return [*events, ResponseEvent(f"response.{response.status}", response=response)]

    def fail(self, error: Exception) -> ResponseEvent:
        """The event of a response that broke in the middle; what it had so far stays in it."""
        if not isinstance(error, (ApiError, GraphRunnerError)):
            log.error("a stream failed", exc_info=error)
        self.response.output = self.builder.items
        self.response.status = FAILED
        self.response.error = ResponseError("server_error", api_error_from(error).body.message)
        return ResponseEvent("response.failed", response=self.response)

    def _counted(self) -> ResponseUsage:
        usage = self.usage.usage()
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(self.builder.num_reasoning_tokens),
            total_tokens=usage.total_tokens,
        )


async def create_response(server: Server, request: Request) -> Response:
    """Answer at once or stream events. Raises what `errors.api_error_from` knows."""
    body = await server.read(request, ResponsesBody)
    body.check()
    server.check_ready()
    server.check_model(body.model)
    earlier = _earlier(server, body)
    try:
        chat = chat_body_of(body, earlier)
        params = chat_sampling(chat)
        tools = None if chat.tool_choice == "none" else chat.tools
        prompt_ids = await server.encoder.encode_chat(chat.messages, tools)
        job = await _job(server, body, chat, params, earlier, prompt_ids)
        generation = await server.start_generation(job.response.id, [prompt_ids], params, body.priority, "input")
    except (ApiError, InvalidRequestError) as error:
        raise client_error(error) from None
    if body.stream:
        on_gone = server.metrics.disconnects.inc
        return EventStream(_events(generation, job), close=generation.aclose, on_gone=on_gone, framed=_framed)
    try:
        response = await unless_disconnected(request.receive, _whole(generation, job))
    finally:
        await generation.aclose()
    return _json(response)


async def retrieve_response(server: Server, request: Request) -> Response:
    """A stored response, as it was answered."""
    stored = server.stored_responses.get(request.path_params["response_id"])
    if stored is None:
        raise _not_found(request)
    return Response(stored.body, media_type="application/json")


async def delete_response(server: Server, request: Request) -> Response:
    """Forget a stored response."""
    response_id = request.path_params["response_id"]
    if not server.stored_responses.delete(response_id):
        raise _not_found(request)
    return _json(DeletedResponse(response_id))


def _not_found(request: Request) -> ApiError:
    message = "no response of that id is stored here"
    return ApiError(HTTPStatus.NOT_FOUND, message, param="response_id", code="not_found")


def _earlier(server: Server, body: ResponsesBody) -> Sequence[Message]:
    if body.previous_response_id is None:
        return ()
    stored = server.stored_responses.get(body.previous_response_id)
    if stored is None:
        problem = "no response of that id is stored here: send the whole conversation as input"
        raise bad_request("previous_response_id", problem, "previous_response_not_found")
    return stored.messages


async def _job(
    server: Server,
    body: ResponsesBody,
    chat: ChatBody,
    params: SamplingParams,
    earlier: Sequence[Message],
    prompt_ids: list[int],
) -> ResponseJob:
    return ResponseJob(
        server=server,
        body=body,
        earlier=earlier,
        response=_begun(server, body, params),
        builder=ResponseBuilder(),
        parser=(await reply_format_of(server, chat, prompt_ids)).parser(),
        usage=UsageCount([len(prompt_ids)]),
    )


def _begun(server: Server, body: ResponsesBody, params: SamplingParams) -> ResponseObject:
    """The response before its first token, with what was asked in it."""
    wanted = body.text.format if body.text else None
    choice = body.tool_choice or "auto"
    return ResponseObject(
        id=new_request_id("resp"),
        created_at=int(time.time()),
        model=server.model_name,
        status=IN_PROGRESS,
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        temperature=params.temperature,
        text=TextSettings(
            TextFormat("text")
            if wanted is None
            else TextFormat(wanted.type, wanted.name, wanted.description, wanted.schema_, wanted.strict)
        ),
        tool_choice=ToolChoice(choice.name) if isinstance(choice, FunctionChoice) else choice,
        tools=[ToolSettings(tool.name, tool.description, tool.parameters, tool.strict) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        store=body.store is not False,
        user=body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
        max_tool_calls=body.max_tool_calls,
    )


async def _whole(generation: Generation, job: ResponseJob) -> ResponseObject:
    async for _, output in generation.outputs():
        job.usage.add(0, output)
        for each in output.outputs:
            job.feed(each)
    job.finish()
    return job.response


async def _events(generation: Generation, job: ResponseJob) -> AsyncGenerator[ResponseEvent, None]:
    """Every event in order, numbered from 0."""
    number = 0
    async with aclosing(_unnumbered(generation, job)) as events:
        async for event in events:
            event.sequence_number = number
            number += 1
            yield event


async def _unnumbered(generation: Generation, job: ResponseJob) -> AsyncGenerator[ResponseEvent, None]:
    yield ResponseEvent("response.created", response=job.response)
    yield ResponseEvent("response.in_progress", response=job.response)
    try:
        async for _, output in generation.outputs():
            job.usage.add(0, output)
            for each in output.outputs:
                for event in job.feed(each):
                    yield event
        for event in job.finish():
            yield event
    except Exception as error:
        yield job.fail(error)


async def _framed(events: AsyncGenerator[ResponseEvent, None]) -> AsyncIterator[bytes]:
    """Server-sent events that carry their type as OpenAI's do; the last one says how it ended."""
    async with aclosing(events):
        async for event in events:
            yield b"event: %b\ndata: %b\n\n" % (event.type.encode(), _encode(event))


def _json(body: msgspec.Struct) -> Response:
    return Response(_encode(body), media_type="application/json")
