"""Around every route: a request id, the key check, one log line. Plain ASGI, so that streams pass through untouched."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphrunner.entrypoints.openai.errors import ApiError, error_response
from graphrunner.entrypoints.openai.front_metrics import FrontMetrics
from graphrunner.telemetry.log import fields, get_logger, request_logging

OPEN_PATHS = frozenset({"/health", "/"})
"""Answered without a key: what a probe asks for, and the page that asks for the key itself."""
QUIET_PATHS = frozenset({"/health", "/metrics", "/debug/steps"})
"""Asked for again and again by machines: logged at debug only."""
access_log = get_logger("graphrunner.access")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestContext:
    """Gives each request an id, says it in the answer, counts and logs the answer."""

    def __init__(self, app: ASGIApp, *, metrics: FrontMetrics, is_logged: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._is_logged = is_logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = clean_request_id(Headers(scope=scope).get("x-request-id"))
        start_s = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with request_logging(request_id):
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                route = scope.get("route")
                path = getattr(route, "path", "other")  # the pattern, so that odd paths do not fill the metrics
                self._metrics.requests.labels(path, str(status)).inc()
                if self._is_logged:
                    duration_ms = (time.perf_counter() - start_s) * 1e3
                    level = logging.DEBUG if path in QUIET_PATHS else logging.INFO
                    access_log.log(
                        level,
                        "%s %s %d %.1f ms",
                        scope["method"],
                        path,
                        status,
                        duration_ms,
                        extra=fields(method=scope["method"], route=path, status=status, duration_ms=duration_ms),
                    )


class ApiKeys:
    """Asks for a bearer token."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        if is_open or self._knows(Headers(scope=scope).get("authorization", "")):
            await self._app(scope, receive, send)
            return
        error = ApiError(HTTPStatus.UNAUTHORIZED, "a valid API key is required", code="invalid_api_key")
        await error_response(error)(scope, receive, send)

    def _knows(self, authorization: str) -> bool:
        """Compares digests of equal length with every key, so that the time says nothing."""
        scheme, _, token = authorization.partition(" ")
        given = _digest(token.strip().encode("utf-8", "replace"))
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def clean_request_id(given: str | None) -> str:
    """The client's id when it is harmless, else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return uuid.uuid4().hex


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
