"""The FastAPI application: routes, middleware, their order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from graphrunner import __version__
from graphrunner.entrypoints.openai import chat, completions, embeddings, live_routes, responses_api, status_routes
from graphrunner.entrypoints.openai.errors import install_error_handlers
from graphrunner.entrypoints.openai.middleware import QUIET_PATHS, ApiKeys, RequestContext
from graphrunner.entrypoints.openai.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    SleepBody,
    TokenizeBody,
    WakeBody,
)
from graphrunner.entrypoints.openai.responses_body import ResponsesBody
from graphrunner.entrypoints.openai.server import Server
from graphrunner.entrypoints.openai.streaming import ClientGoneError
from graphrunner.entrypoints.openai.tracing import RequestSpans

Handler = Callable[[Server, Request], Awaitable[Response]]
CLIENT_CLOSED_REQUEST = 499

_POSTS: tuple[tuple[str, Handler, type[BaseModel]], ...] = (
    ("/v1/chat/completions", chat.create_chat_completion, ChatBody),
    ("/v1/completions", completions.create_completion, CompletionBody),
    ("/v1/responses", responses_api.create_response, ResponsesBody),
    ("/v1/embeddings", embeddings.create_embeddings, EmbeddingBody),
    ("/tokenize", status_routes.tokenize, TokenizeBody),
    ("/detokenize", status_routes.detokenize, DetokenizeBody),
    ("/sleep", status_routes.sleep, SleepBody),
    ("/wake", status_routes.wake, WakeBody),
)
_GETS: tuple[tuple[str, Handler], ...] = (
    ("/v1/models", status_routes.list_models),
    ("/v1/models/{model:path}", status_routes.get_model),
    ("/v1/responses/{response_id}", responses_api.retrieve_response),
    ("/health", status_routes.health),
    ("/metrics", status_routes.metrics),
    ("/debug/steps", live_routes.live_steps),
    ("/", live_routes.page),
)


def build_app(server: Server) -> FastAPI:
    """The application of one server. /openapi.json describes it; there are no pages that load scripts from elsewhere.

    Raises:
        ConfigError: the API keys cannot be read.
    """
    app = FastAPI(title="graphrunner", version=__version__, docs_url=None, redoc_url=None)
    for path, handler, kind in _POSTS:
        _add(app, server, path, handler, method="POST", body=kind)
    for path, handler in _GETS:
        _add(app, server, path, handler)
    _add(app, server, "/v1/responses/{response_id}", responses_api.delete_response, method="DELETE")
    install_error_handlers(app)

    async def gone(request: Request, error: Exception) -> Response:
        server.metrics.disconnects.inc()
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientGoneError, gone)
    keys = server.options.api_keys()
    if keys:
        app.add_middleware(ApiKeys, keys=keys)
    if server.options.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.options.cors_origin),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    app.add_middleware(RequestContext, metrics=server.metrics, is_logged=server.options.log_requests)
    if server.tracer is not None:
        app.add_middleware(RequestSpans, tracer=server.tracer, quiet_paths=QUIET_PATHS)
    return app


def _add(
    app: FastAPI,
    server: Server,
    path: str,
    handler: Handler,
    *,
    method: str = "GET",
    body: type[BaseModel] | None = None,
) -> None:
    async def endpoint(request: Request) -> Response:
        return await handler(server, request)

    endpoint.__doc__ = handler.__doc__
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        operation_id=handler.__name__,
        response_class=Response,
        openapi_extra=None if body is None else {"requestBody": _body_schema(body)},
    )


def _body_schema(kind: type[BaseModel]) -> dict[str, object]:
    return {"required": True, "content": {"application/json": {"schema": _inlined(kind)}}}


def _inlined(kind: type[BaseModel]) -> object:
    """The model's schema without references, which OpenAPI would look for elsewhere."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(node: object) -> object:
        if isinstance(node, dict):
            name = str(node.get("$ref", "")).rpartition("/")[2]
            if "$ref" in node:
                return resolve(definitions[name])
            return {key: resolve(value) for key, value in node.items()}
        return list(map(resolve, node)) if isinstance(node, list) else node

    return resolve(schema)
