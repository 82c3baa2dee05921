"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}. No traceback, no path, no prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus

import msgspec
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from graphrunner.core.errors import EngineDeadError, EngineStateError, InvalidRequestError
from graphrunner.scheduler.admission import QueueFullError

PRIVATE_FIELDS = frozenset({"prompt", "messages", "input"})
"""Fields whose value is the user's text: an error names the field only."""
RETRY_AFTER_S = 1
_COUNT = re.compile(r"\d+( tokens)?")
_CLASS_NAME = re.compile(r"([A-Z][a-z]+){2,}")
_TYPE_LABELS = frozenset({"str", "int", "float", "bool", "none", "constrained-str", "dict", "list"})


class ErrorBody(msgspec.Struct):
    """What stands under "error"."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """The whole body, or the whole stream event."""

    error: ErrorBody


class ApiError(Exception):
    """A request that ends with an error.

    Args:
        status: HTTP status.
        message: one line for the client.
        param: the field that is wrong.
        code: a word a program can test for.
        retry_after_s: when it makes sense to come back.
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.body = ErrorBody(message, _error_type(status), param, code)


def bad_request(param: str, problem: str, code: str | None = None) -> ApiError:
    """400 that names its field."""
    return ApiError(HTTPStatus.BAD_REQUEST, f"{param}: {problem}", param=param, code=code)


def unsupported(param: str) -> ApiError:
    """400 for a documented field that this server does not have."""
    return bad_request(param, "is not supported by this server", "unsupported_parameter")


def api_error_from(error: Exception) -> ApiError:
    """What a client is told about an exception; unknown ones say nothing of themselves."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return too_busy("the queue is full")
        case InvalidRequestError(field=field, value=value, problem=problem):
            is_shown = field not in PRIVATE_FIELDS or _COUNT.fullmatch(str(value)) is not None
            message = str(error) if is_shown else f"{field}: {problem}"
            return ApiError(HTTPStatus.BAD_REQUEST, message, param=field.split("[")[0], code="invalid_value")
        case ValidationError():
            return _validation_error(error)
        case EngineStateError():
            return unavailable("the engine is asleep")
        case EngineDeadError():
            return unavailable("the engine is not running")
        case HTTPException(status_code=status):
            return ApiError(HTTPStatus(status), HTTPStatus(status).phrase.lower())
        case _:
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed on this request; its log says why")


def too_busy(problem: str) -> ApiError:
    """429 with Retry-After."""
    message = f"{problem}; try again later"
    return ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S)


def unavailable(problem: str) -> ApiError:
    """503 with Retry-After."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, problem, code="unavailable", retry_after_s=RETRY_AFTER_S)


def error_response(error: ApiError) -> Response:
    """The HTTP answer."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
        headers["Connection"] = "close"  # the rest of the body may be under way still
    if error.status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    content = msgspec.json.encode(ErrorResponse(error.body))
    return Response(content, status_code=error.status, headers=headers, media_type="application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Make every exception of a route an OpenAI error."""

    async def answer(request: Request, error: Exception) -> Response:
        return error_response(api_error_from(error))

    for kind in (
        ApiError,
        InvalidRequestError,
        EngineStateError,
        EngineDeadError,
        ValidationError,
        HTTPException,
        Exception,
    ):
        app.add_exception_handler(kind, answer)


def _validation_error(error: ValidationError) -> ApiError:
    """The deepest problem that pydantic found, by the name of its field."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = max(problems, key=lambda problem: len(problem["loc"]))  # of a union, the member that went furthest
    param = _param(first["loc"])
    if first["type"] == "extra_forbidden":
        message, code = f"unknown field: {param}", "unknown_parameter"
    elif first["type"] == "missing":
        message, code = f"{param}: is required", "missing_required_parameter"
    else:
        message, code = f"{param}: {first['msg'].removeprefix('Value error, ')}", "invalid_value"
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def _param(loc: Sequence[int | str]) -> str:
    """messages[0].role; labels that pydantic adds for members of a union are left out."""
    text = ""
    for place, part in enumerate(loc, start=1):
        if isinstance(part, int):
            text += f"[{part}]"
        elif place < len(loc) and _CLASS_NAME.fullmatch(part):
            continue
        elif part not in _TYPE_LABELS and re.fullmatch(r"[a-z][a-z0-9_]*|[^\W\d][\w-]{0,63}", part):
            text += f".{part}" if text else part
    return text or "body"


def _error_type(status: HTTPStatus) -> str:
    if status is HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    if status is HTTPStatus.UNAUTHORIZED:
        return "authentication_error"
    return "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
