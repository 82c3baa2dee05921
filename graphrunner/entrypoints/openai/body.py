"""From the bytes of a request to a checked model, with the limits of a door."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TypeVar

from pydantic import BaseModel
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from graphrunner.entrypoints.openai.errors import ApiError

Model = TypeVar("Model", bound=BaseModel)
# A page of another site may send these, or none at all, without asking first, so they never reach the engine.
_SIMPLE_CONTENT_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")


async def read_model(request: Request, kind: type[Model], max_bytes: int, timeout_s: float) -> Model:
    """Read, parse and check a JSON body.

    Raises:
        ApiError: 413 too large, 408 too slow, 400 not JSON (NaN, lone surrogates and deep nesting included).
        ValidationError: it does not fit `kind`.
    """
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    is_left_out_by_page = not content_type and "origin" in request.headers
    if content_type in _SIMPLE_CONTENT_TYPES or is_left_out_by_page:
        raise ApiError(HTTPStatus.BAD_REQUEST, "send JSON, with the header Content-Type: application/json")
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(HTTPStatus.REQUEST_TIMEOUT, "the body did not arrive in time") from None
    except ClientDisconnect:
        raise ApiError(HTTPStatus.BAD_REQUEST, "the body was cut off") from None
    if not body:
        raise ApiError(
            HTTPStatus.BAD_REQUEST, "the body is empty: send a JSON object, {} at least", code="invalid_json"
        )
    try:
        parsed = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise ApiError(HTTPStatus.BAD_REQUEST, "the body must be a JSON object", code="invalid_json")
    return kind.model_validate(parsed, strict=True)


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)
