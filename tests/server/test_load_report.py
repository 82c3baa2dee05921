"""Arrivals and percentiles of the load generator."""

from __future__ import annotations

import itertools
import math
import statistics

from graphrunner.entrypoints.cli.bench.arrivals import poisson_arrivals
from graphrunner.entrypoints.cli.bench.load_report import Objective, RequestTimes, make_report, percentile


def test_percentiles_are_those_of_the_standard_library() -> None:
    values = sorted(float((7 * index) % 101) for index in range(101))
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 90, 99):
        assert math.isclose(percentile(values, percent), cuts[percent - 1])


def test_poisson_arrivals_have_their_rate_and_repeat() -> None:
    arrivals = poisson_arrivals(4000, 10.0, 100, 50, spread=0.5, seed=1)
    assert arrivals == poisson_arrivals(4000, 10.0, 100, 50, spread=0.5, seed=1)
    assert math.isclose(arrivals[-1].start_s, 400, rel_tol=0.1)
    gaps = [after.start_s - before.start_s for before, after in itertools.pairwise(arrivals)]
    assert math.isclose(statistics.stdev(gaps), 0.1, rel_tol=0.1)  # of an exponential: its mean
    assert min(one.prompt_len for one in arrivals) >= 50 and max(one.prompt_len for one in arrivals) <= 150
    assert {one.start_s for one in poisson_arrivals(5, math.inf, 1, 1, spread=0, seed=0)} == {0.0}


def test_goodput_counts_requests_within_the_objective() -> None:
    fast = RequestTimes(0.0, [0.1, 0.2, 0.3], 0.3, 3)
    slow_start = RequestTimes(0.0, [0.9, 1.0], 1.0, 2)
    slow_tokens = RequestTimes(0.0, [0.1, 0.9], 0.9, 2)
    failed = RequestTimes(0.0, [], 0.1, 0, "HTTP 500")
    report = make_report([fast, slow_start, slow_tokens, failed], 2.0, Objective(ttft_ms=500, itl_ms=150))
    assert report.goodput_requests_per_s == 0.5 and report.requests_per_s == 1.5
    assert report.output_tokens_per_s == 3.5 and report.num_failed == 1 and report.errors == {"HTTP 500": 1}
    assert report.ttft_ms["p50"] == 100.0
