"""Routes that generate nothing: models, health, metrics, tokens."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from graphrunner.entrypoints.openai.engine_client import HealthState
from graphrunner.entrypoints.openai.errors import bad_request
from graphrunner.entrypoints.openai.protocol import DetokenizeBody, TokenizeBody
from graphrunner.entrypoints.openai.responses import (
    Detokenized,
    HealthBody,
    ModelCard,
    ModelList,
    Tokenized,
)
from graphrunner.entrypoints.openai.server import Server

PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def health(server: Server, request: Request) -> Response:
    """200 when ready; 503 starting, draining or dead. The reason of a death stays in the log: it may hold paths."""
    state = server.client.health().state
    status = HTTPStatus.OK if state is HealthState.READY else HTTPStatus.SERVICE_UNAVAILABLE
    return _json(HealthBody(state.value), status)


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


def _card(server: Server) -> ModelCard:
    return ModelCard(server.model_name, server.start_s, server.client.max_model_len)


def _json(body: msgspec.Struct, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
