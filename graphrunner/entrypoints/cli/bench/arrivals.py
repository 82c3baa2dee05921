"""When requests arrive and how long they are: Poisson, or replayed from a trace file. Pure functions."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from graphrunner.core.errors import ConfigError

_TIME = ("TIMESTAMP", "timestamp", "arrival_s")
_PROMPT = ("ContextTokens", "prompt_len", "input_tokens")
_OUTPUT = ("GeneratedTokens", "output_len", "output_tokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come: seconds after the start, and lengths in tokens."""

    start_s: float
    prompt_len: int
    output_len: int


def poisson_arrivals(
    num_requests: int, rate_per_s: float, prompt_len: int, output_len: int, *, spread: float, seed: int
) -> list[Arrival]:
    """Independent arrivals at a mean rate; an infinite rate brings all at once.

    Args:
        spread: lengths are uniform in [len * (1 - spread), len * (1 + spread)].
    """
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    now_s = 0.0
    for _ in range(num_requests):
        arrivals.append(Arrival(now_s, _drawn(rng, prompt_len, spread), _drawn(rng, output_len, spread)))
        now_s += rng.expovariate(rate_per_s) if rate_per_s != float("inf") else 0.0
    return arrivals


def trace_arrivals(path: Path, *, num_requests: int, time_scale: float, max_len: int | None) -> list[Arrival]:
    """The first requests of a CSV with a time and two lengths a row (as the public Azure LLM traces have them).

    Args:
        time_scale: 2 makes the trace twice as slow, 0.5 twice as fast.
        max_len: cut lengths to this; None keeps them.

    Raises:
        ConfigError: the file cannot be read, or lacks a column.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row, _ in zip(csv.DictReader(file), range(num_requests), strict=False)]
        times = [_seconds(_column(row, _TIME)) for row in rows]
        lens = [(int(_column(row, _PROMPT)), int(_column(row, _OUTPUT))) for row in rows]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("trace", str(path), f"cannot be read as a trace: {error}") from None
    if not rows:
        raise ConfigError("trace", str(path), "holds no requests")
    return [
        Arrival((time_s - times[0]) * time_scale, _cut(prompt_len, max_len), _cut(output_len, max_len))
        for time_s, (prompt_len, output_len) in zip(times, lens, strict=True)
    ]


def _drawn(rng: random.Random, mean: int, spread: float) -> int:
    return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))


def _cut(length: int, limit: int | None) -> int:
    return max(1, length if limit is None else min(length, limit))


def _column(row: dict[str, str], names: Sequence[str]) -> str:
    for name in names:
        if row.get(name):
            return row[name]
    raise KeyError(f"no column named {' or '.join(names)}")


def _seconds(text: str) -> float:
    """A number of seconds, or a date and time with up to seven digits of a second."""
    try:
        return float(text)
    except ValueError:
        whole, _, fraction = text.partition(".")
        return datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")
