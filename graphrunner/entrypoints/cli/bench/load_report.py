"""What a load run measured: percentiles, throughput, goodput. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class RequestTimes:
    """One request as its client saw it.

    Attributes:
        start_s: when it was sent, seconds after the run's start.
        token_s: when each chunk with text arrived, after `start_s`.
        end_s: when its stream ended, after `start_s`.
        num_tokens: output tokens by the server's usage; chunks when it gave none.
        error: why it failed; None when it did not.
        late_s: how much after its time it was sent, because the sender was busy.
    """

    start_s: float
    token_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_tokens: int = 0
    error: str | None = None
    late_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] if self.token_s else math.inf

    @property
    def inter_token_s(self) -> list[float]:
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Objective:
    """A service level: a request is good when it holds both, its mean inter-token time counting."""

    ttft_ms: float = math.inf
    itl_ms: float = math.inf

    def holds(self, request: RequestTimes) -> bool:
        if request.error is not None or not request.token_s:
            return False
        gaps = request.inter_token_s
        mean_itl_s = sum(gaps) / len(gaps) if gaps else 0.0
        return request.ttft_s * 1e3 <= self.ttft_ms and mean_itl_s * 1e3 <= self.itl_ms


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Times in ms, by percentile; `late_ms` is how far the sender itself was behind, and should be next to nothing."""

    num_requests: int
    num_failed: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    goodput_requests_per_s: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]
    late_ms: dict[str, float]
    errors: dict[str, int]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def make_report(requests: Sequence[RequestTimes], duration_s: float, objective: Objective) -> LoadReport:
    """Sum up a run of `duration_s` seconds."""
    done = [request for request in requests if request.error is None]
    errors: dict[str, int] = {}
    for request in requests:
        if request.error is not None:
            errors[request.error] = errors.get(request.error, 0) + 1
    seconds = max(duration_s, 1e-9)
    return LoadReport(
        num_requests=len(requests),
        num_failed=len(requests) - len(done),
        duration_s=duration_s,
        requests_per_s=len(done) / seconds,
        output_tokens_per_s=sum(request.num_tokens for request in done) / seconds,
        goodput_requests_per_s=sum(objective.holds(request) for request in requests) / seconds,
        ttft_ms=_percentiles([request.ttft_s for request in done if request.token_s]),
        itl_ms=_percentiles([gap for request in done for gap in request.inter_token_s]),
        e2e_ms=_percentiles([request.end_s for request in done]),
        late_ms=_percentiles([request.late_s for request in requests]),
        errors=errors,
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value at a percentile of sorted values, between neighbours in proportion."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {f"p{percent}": percentile(ordered, percent) * 1e3 for percent in PERCENTILES}
