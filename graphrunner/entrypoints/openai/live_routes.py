"""/ and /debug/steps: a page with a chat and a live view of the engine, and the numbers behind that view."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from graphrunner import __version__
from graphrunner.core.outputs import StepRecord
from graphrunner.entrypoints.openai.engine_client import HealthState
from graphrunner.entrypoints.openai.errors import bad_request
from graphrunner.entrypoints.openai.server import Server

PAGE = Path(__file__).parent / "page.html"
_MAX_STEP_DIGITS = 15


class LiveStep(Struct):
    """One step: which runner took it, at which shape, how much of it was padding, and why no graph ran.

    `num_drafts` draft tokens were verified for `num_rounds` requests, `num_accepted` of them stand.
    """

    id: int
    mode: str
    runner: str
    key: str
    num_reqs: int
    num_tokens: int
    num_padding_tokens: int
    is_graph: bool
    miss: str | None
    ms: float
    num_drafts: int
    num_accepted: int
    num_rounds: int


class LiveView(Struct):
    """The engine now, and its steps after the one that was asked from."""

    model: str
    version: str
    health: str
    max_model_len: int
    num_running: int
    num_waiting: int
    num_sequences: int
    num_used_pages: int
    num_pages: int
    num_cached_pages: int
    num_preemptions: int
    num_output_tokens: int
    steps: list[LiveStep]


async def page(server: Server, request: Request) -> Response:
    """The page: one file, nothing from elsewhere, and no script but its own."""
    content, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(content, media_type="text/html", headers=headers)


async def live_steps(server: Server, request: Request) -> Response:
    """What the live view shows. `?after=ID` leaves out the steps up to ID."""
    after = _step_id(request.query_params.get("after", "-1"))
    stats = server.client.stats()
    health = server.client.health().state
    has_engine = health in (HealthState.READY, HealthState.DRAINING)
    view = LiveView(
        model=server.model_name if has_engine else "",
        version=__version__,
        health=server.state_name,
        max_model_len=server.client.max_model_len if has_engine else 0,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_sequences=server.admission.num_sequences,
        num_used_pages=stats.num_used_pages,
        num_pages=stats.num_pages,
        num_cached_pages=stats.num_cached_pages,
        num_preemptions=stats.num_preemptions,
        num_output_tokens=stats.num_output_tokens,
        steps=[_shown(step) for step in stats.steps if step.step_id > after],
    )
    return Response(msgspec.json.encode(view), media_type="application/json", headers={"Cache-Control": "no-store"})


def _shown(step: StepRecord) -> LiveStep:
    return LiveStep(
        id=step.step_id,
        mode=step.mode.value,
        runner=step.runner,
        key=str(step.key),
        num_reqs=step.num_reqs,
        num_tokens=step.num_tokens,
        num_padding_tokens=step.num_padding_tokens,
        is_graph=step.is_graph,
        miss=str(step.miss_reason) if step.miss_reason else None,
        ms=round(step.duration_ms, 3),
        num_drafts=step.num_drafts,
        num_accepted=step.num_accepted,
        num_rounds=len(step.accepted_lengths),
    )


def _step_id(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]+", text) or len(text) > _MAX_STEP_DIGITS:
        raise bad_request("after", "must be the id of a step", "invalid_value")
    return int(text)


@cache
def _page() -> tuple[bytes, str]:
    """The file, and a policy that allows the script and the style in it and no others."""
    text = PAGE.read_text(encoding="utf-8")
    script, style = (_hash_of(text, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode("utf-8"), policy


def _hash_of(text: str, tag: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    assert found is not None, f"the page has no {tag}"
    return "sha256-" + base64.b64encode(hashlib.sha256(found.group(1).encode("utf-8")).digest()).decode("ascii")
