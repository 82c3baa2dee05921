"""/v1/embeddings: pooled hidden states of a causal model, scaled to length 1."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from graphrunner.core.pooling import Pooling, unit_vector
from graphrunner.entrypoints.openai.errors import ApiError, bad_request, unsupported
from graphrunner.entrypoints.openai.generation import new_request_id
from graphrunner.entrypoints.openai.prompts import prompts_of
from graphrunner.entrypoints.openai.protocol import EmbeddingBody
from graphrunner.entrypoints.openai.responses import Embedding, EmbeddingList, EmbeddingUsage
from graphrunner.entrypoints.openai.server import Server
from graphrunner.entrypoints.openai.streaming import unless_disconnected


async def create_embeddings(server: Server, request: Request) -> Response:
    """One vector an input."""
    body = await server.read(request, EmbeddingBody)
    if body.dimensions is not None:
        raise unsupported("dimensions")
    server.check_ready()
    server.check_model(body.model)
    encoded = await server.encoder.encode(prompts_of(body.input, "input"), "input")
    prompts = [each.token_ids for each in encoded]
    limit = server.client.max_model_len
    for ids in prompts:
        if len(ids) > limit:
            problem = f"has {len(ids)} tokens, and the context holds {limit}"
            raise bad_request("input", problem, "context_length_exceeded")
    ticket = server.admission.enter(len(prompts), server.client.health(), "input")
    try:
        async with asyncio.timeout(server.options.request_timeout_s):
            vectors = await unless_disconnected(request.receive, _embed(server, prompts, body))
    except TimeoutError:
        raise ApiError(HTTPStatus.GATEWAY_TIMEOUT, "the request took too long", code="timeout") from None
    finally:
        ticket.release()
    num_tokens = sum(map(len, prompts))
    answer = EmbeddingList(
        [Embedding(index, _written(vector, body.encoding_format)) for index, vector in enumerate(vectors)],
        server.model_name,
        EmbeddingUsage(num_tokens, num_tokens),
    )
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _embed(server: Server, prompts: Sequence[Sequence[int]], body: EmbeddingBody) -> list[list[float]]:
    """All prompts at once: the engine batches them. When one fails the others are stopped."""
    request_id, pooling = new_request_id("embd"), Pooling(body.pooling)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(server.client.embed(f"{request_id}-{index}", ids, pooling, body.priority))
                for index, ids in enumerate(prompts)
            ]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    vectors = [unit_vector(task.result()) for task in tasks]
    usable = [vector for vector in vectors if vector is not None]
    if len(usable) < len(vectors):
        raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the model gave no usable embedding for this input")
    return usable


def _written(vector: list[float], encoding_format: str) -> list[float] | str:
    if encoding_format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
