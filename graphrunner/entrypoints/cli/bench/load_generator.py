"""An open-loop load: every request is sent at its time, however slow the server is."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from graphrunner.entrypoints.cli.bench.arrivals import Arrival
from graphrunner.entrypoints.cli.bench.load_report import RequestTimes

FIRST_ID, LAST_ID = 10, 1000
WORD = " word"  # about a token in every vocabulary; for servers that take no token ids


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send, and how.

    Attributes:
        has_token_prompts: send prompts as token ids; False sends words, so lengths are rough.
        has_ignore_eos: ask for outputs of the full length (a field beyond OpenAI's).
    """

    base_url: str
    model: str
    api_key: str | None = None
    has_token_prompts: bool = True
    has_ignore_eos: bool = True
    timeout_s: float = 600.0


async def run_load(
    target: Target,
    arrivals: Sequence[Arrival],
    *,
    seed: int = 0,
    on_done: Callable[[RequestTimes], None] = lambda times: None,
) -> tuple[list[RequestTimes], float]:
    """Send every request at its time; the times of each, in order, and the seconds until the last ended."""
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # trust_env=False: a proxy of the environment must not stand between a load and its server.
    async with httpx.AsyncClient(
        base_url=target.base_url, headers=headers, timeout=target.timeout_s, limits=limits, trust_env=False
    ) as client:
        start_s = time.perf_counter()

        async def send(index: int, arrival: Arrival) -> RequestTimes:
            await asyncio.sleep(max(0.0, arrival.start_s - (time.perf_counter() - start_s)))
            times = await _one(client, target, arrival, random.Random(seed * 1_000_003 + index), start_s)
            on_done(times)
            return times

        requests = await asyncio.gather(*(send(index, arrival) for index, arrival in enumerate(arrivals)))
        return list(requests), time.perf_counter() - start_s


async def _one(
    client: httpx.AsyncClient, target: Target, arrival: Arrival, rng: random.Random, run_start_s: float
) -> RequestTimes:
    """One streamed completion."""
    sent_s = time.perf_counter()
    times = RequestTimes(sent_s - run_start_s, late_s=max(0.0, sent_s - run_start_s - arrival.start_s))
    try:
        async with client.stream("POST", "/completions", json=_body(target, arrival, rng)) as answer:
            if answer.status_code != httpx.codes.OK:
                await answer.aread()
                times.error = f"HTTP {answer.status_code}"
                return times
            async for line in answer.aiter_lines():
                _take(times, line, time.perf_counter() - sent_s)
    except httpx.HTTPError as error:
        times.error = type(error).__name__
    times.end_s = time.perf_counter() - sent_s
    times.num_tokens = times.num_tokens or len(times.token_s)
    if times.error is None and not times.token_s:
        times.error = "no token came"
    return times


def _body(target: Target, arrival: Arrival, rng: random.Random) -> dict[str, object]:
    ids = [rng.randint(FIRST_ID, LAST_ID) for _ in range(arrival.prompt_len)]
    body: dict[str, object] = {
        "model": target.model,
        "prompt": ids if target.has_token_prompts else WORD * arrival.prompt_len,
        "max_tokens": arrival.output_len,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.has_ignore_eos:
        body["ignore_eos"] = True
    return body


def _take(times: RequestTimes, line: str, now_s: float) -> None:
    """Read one line of the stream."""
    if not line.startswith("data:") or line == "data: [DONE]":
        return
    chunk = json.loads(line[len("data:") :])
    if "error" in chunk:
        times.error = "error in the stream"
        return
    if any(choice.get("text") for choice in chunk.get("choices", ())):
        times.token_s.append(now_s)
    usage = chunk.get("usage")
    if usage:
        times.num_tokens = int(usage["completion_tokens"])
