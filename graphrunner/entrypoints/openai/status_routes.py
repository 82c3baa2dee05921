"""Routes that generate nothing: models, health, metrics, tokens, sleep."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from graphrunner.core.errors import EngineStateError
from graphrunner.entrypoints.openai.engine_client import HealthState
from graphrunner.entrypoints.openai.errors import ApiError, bad_request, unavailable
from graphrunner.entrypoints.openai.protocol import DetokenizeBody, SleepBody, TokenizeBody, WakeBody
from graphrunner.entrypoints.openai.responses import (
    Detokenized,
    HealthBody,
    ModelCard,
    ModelList,
    RestBody,
    Tokenized,
)
from graphrunner.entrypoints.openai.server import Server

PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def health(server: Server, request: Request) -> Response:
    """200 when ready; 503 starting, asleep, draining or dead. Why it died stays in the log: it may hold paths."""
    name = server.state_name
    status = HTTPStatus.OK if name == HealthState.READY.value else HTTPStatus.SERVICE_UNAVAILABLE
    return _json(HealthBody(name), status)


async def metrics(server: Server, request: Request) -> Response:
    """The front's metrics and the engine's."""
    text = server.metrics.text() + server.client.metrics_text()
    return Response(text, headers={"content-type": PROMETHEUS_TYPE})


async def list_models(server: Server, request: Request) -> Response:
    """The one model."""
    server.check_ready()
    return _json(ModelList([_card(server)]))


async def get_model(server: Server, request: Request) -> Response:
    """The one model, by its name."""
    server.check_ready()
    server.check_model(request.path_params["model"])
    return _json(_card(server))


async def tokenize(server: Server, request: Request) -> Response:
    """Token ids of a text, or of a conversation under the chat template."""
    body = await server.read(request, TokenizeBody)
    server.check_ready()
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt", "give either prompt or messages", "invalid_value")
    if body.messages is not None:
        add_prompt = body.add_generation_prompt
        ids = await server.encoder.encode_chat(body.messages, body.tools, add_generation_prompt=add_prompt)
    elif body.prompt:
        ids = list((await server.encoder.encode([body.prompt], "prompt"))[0].token_ids)
    else:
        ids = []
    return _json(Tokenized(len(ids), server.client.max_model_len, ids))


async def detokenize(server: Server, request: Request) -> Response:
    """The text of token ids."""
    body = await server.read(request, DetokenizeBody)
    server.check_ready()
    server.check_model(body.model)
    if body.tokens:
        server.encoder.check_ids(body.tokens, "tokens")
    return _json(Detokenized(await server.encoder.decode(body.tokens, "tokens")))


async def sleep(server: Server, request: Request) -> Response:
    """Give the device back until /wake. 409 while requests wait or run."""
    body = await server.read(request, SleepBody)
    _check_may_rest(server)
    try:
        await server.client.sleep(body.level)
    except EngineStateError as error:
        raise ApiError(HTTPStatus.CONFLICT, str(error), code="engine_busy") from None
    return _json(RestBody(server.client.is_asleep))


async def wake(server: Server, request: Request) -> Response:
    """Restore what /sleep gave back; answers when requests can be served. 503 when there is no room for it."""
    await server.read(request, WakeBody)
    _check_may_rest(server)
    try:
        await server.client.wake()
    except EngineStateError as error:
        raise unavailable(str(error)) from None
    return _json(RestBody(server.client.is_asleep))


def _check_may_rest(server: Server) -> None:
    if not server.options.allow_sleep:
        message = "start the server with --allow-sleep to let clients put the engine to sleep"
        raise ApiError(HTTPStatus.FORBIDDEN, message, code="not_allowed")
    server.check_ready()


def _card(server: Server) -> ModelCard:
    return ModelCard(server.model_name, server.start_s, server.client.max_model_len)


def _json(body: msgspec.Struct, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
