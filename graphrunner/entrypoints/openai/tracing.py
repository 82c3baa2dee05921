"""One OpenTelemetry span a request, sent to a collector. Needs the extra `otel`; without an endpoint nothing is made.

Names follow OpenTelemetry's HTTP and generative-AI conventions. No prompt and no reply is in a span.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphrunner import __version__
from graphrunner.core.errors import ConfigError

AttributeValue = str | int | float | bool
FLUSH_TIMEOUT_MS = 3000


class RequestSpan(Protocol):
    """The span of one request."""

    def set_attribute(self, key: str, value: AttributeValue) -> None: ...

    def add_event(self, name: str) -> None: ...

    def update_name(self, name: str) -> None: ...

    def fail(self, description: str) -> None: ...

    def end(self) -> None: ...


class Tracer(Protocol):
    """Makes spans and sends them."""

    def start(self, name: str, headers: Mapping[str, str]) -> RequestSpan:
        """Begin a span; `headers` may name the caller's (traceparent)."""
        ...

    def close(self) -> None:
        """Send what is left, waiting a little for the collector. Idempotent."""
        ...


_current: ContextVar[RequestSpan | None] = ContextVar("graphrunner_span", default=None)


def annotate(**values: AttributeValue) -> None:
    """Add attributes to the span of the current request, if it has one; `__` in a name stands for a dot."""
    span = _current.get()
    if span is not None:
        for key, value in values.items():
            span.set_attribute(key.replace("__", "."), value)


class RequestSpans:
    """Middleware: a span around every request but those for health, metrics and the page."""

    def __init__(self, app: ASGIApp, *, tracer: Tracer, quiet_paths: frozenset[str]) -> None:
        self._app = app
        self._tracer = tracer
        self._quiet_paths = quiet_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._quiet_paths:
            await self._app(scope, receive, send)
            return
        span = self._tracer.start(scope["method"], Headers(scope=scope))
        span.set_attribute("http.request.method", scope["method"])
        has_body = False

        async def send_seen(message: Message) -> None:
            nonlocal has_body
            if message["type"] == "http.response.start":
                _note_start(span, scope, message)
            elif message.get("body") and not has_body:
                has_body = True
                span.add_event("first byte of the answer")
            await send(message)

        token = _current.set(span)
        try:
            await self._app(scope, receive, send_seen)
        except BaseException as error:
            span.fail(type(error).__name__)
            raise
        finally:
            _current.reset(token)
            span.end()


def _note_start(span: RequestSpan, scope: Scope, message: Message) -> None:
    path = getattr(scope.get("route"), "path", None)
    if path is not None:
        span.update_name(f"{scope['method']} {path}")
        span.set_attribute("http.route", path)
    status = message["status"]
    span.set_attribute("http.response.status_code", status)
    request_id = Headers(raw=message["headers"]).get("x-request-id")
    if request_id is not None:
        span.set_attribute("graphrunner.request_id", request_id)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        span.fail(f"status {status}")


def otlp_tracer(endpoint: str) -> Tracer:
    """A tracer that sends spans over OTLP/HTTP in batches, on a thread of its own.

    Args:
        endpoint: where the collector takes traces, as http://127.0.0.1:4318/v1/traces.

    Raises:
        ConfigError: the packages are not installed, or the endpoint is no URL.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError("otlp_endpoint", endpoint, "must be a URL, as http://127.0.0.1:4318/v1/traces")
    try:
        from graphrunner.entrypoints.openai.otlp import OtlpTracer
    except ImportError as error:
        raise ConfigError("otlp_endpoint", endpoint, f"needs pip install 'graphrunner[otel]' ({error})") from None
    return OtlpTracer(endpoint, __version__)
