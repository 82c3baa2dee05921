"""/v1/responses: create (whole or as events), retrieve, delete. Text in, text and function calls out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.outputs import CompletionOutput, RequestOutput
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
from graphrunner.entrypoints.openai.streaming import EventStream, log_failure, unless_disconnected

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
        log_failure(error)
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
        generation = await server.start_generation(
            # In pieces either way: that is how the tokens of the reasoning are told from the others.
            job.response.id,
            [prompt_ids],
            params,
            body.priority,
            "input",
            is_streamed=True,
        )
    except (ApiError, InvalidRequestError) as error:
        raise client_error(error) from None
    if body.stream:
        return EventStream(generation, ResponseEvents(job), on_gone=server.metrics.disconnects.inc)
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
    def take(prompt_index: int, output: RequestOutput) -> None:
        job.usage.add(prompt_index, output)
        for each in output.outputs:
            job.feed(each)

    await generation.collect(take)
    job.finish()
    return job.response


class ResponseEvents:
    """Every event in order, numbered from 0, each with its type. See `ReplyEvents`."""

    def __init__(self, job: ResponseJob) -> None:
        self._job = job
        self._next_number = 0

    def first(self) -> bytes:
        """The response is there, and empty."""
        names = ("response.created", "response.in_progress")
        return self._framed([ResponseEvent(name, response=self._job.response) for name in names])

    def take(self, prompt_index: int, output: RequestOutput) -> bytes:
        """What one step added."""
        self._job.usage.add(prompt_index, output)
        return self._framed([made for each in output.outputs for made in self._job.feed(each)])

    def last(self) -> bytes:
        """The last event holds the whole response."""
        return self._framed(self._job.finish())

    def failed(self, error: Exception) -> bytes:
        """The last event says what went wrong."""
        return self._framed([self._job.fail(error)])

    def _framed(self, events: Sequence[ResponseEvent]) -> bytes:
        lines: list[bytes] = []
        for each in events:
            each.sequence_number = self._next_number
            self._next_number += 1
            lines.append(b"event: %b\ndata: %b\n\n" % (each.type.encode(), _encode(each)))
        return b"".join(lines)


def _json(body: msgspec.Struct) -> Response:
    return Response(_encode(body), media_type="application/json")
