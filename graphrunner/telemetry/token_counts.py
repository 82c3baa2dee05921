"""Counts taken once a token or round: plain numbers, read by Prometheus only when it asks.

A prometheus_client metric takes a lock for each observation, which at 256 tokens a step is most of the host's time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_BOUNDS_DRAFTS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)


class TokenCounts(Collector):
    """Tokens handed out, and a histogram of the gaps between them. One writer."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._gap_sum_s = 0.0
        self._counts = [0] * (len(_BOUNDS_S) + 1)

    def add(self, num_tokens: int, gap_s: float | None) -> None:
        """Count tokens handed out together, `gap_s` after the ones before; None for a sequence's first.

        A step with speculation yields several tokens: each of them took its share of the gap.
        """
        self._num_tokens += num_tokens
        if gap_s is not None:
            self._gap_sum_s += gap_s
            self._counts[bisect_left(_BOUNDS_S, gap_s / num_tokens)] += num_tokens

    def collect(self) -> Iterator[Metric]:
        """The two families, for a registry."""
        yield CounterMetricFamily("graphrunner_output_tokens", "Tokens generated", value=self._num_tokens)
        totals = accumulate(self._counts)
        bounds = [str(bound) for bound in _BOUNDS_S] + ["+Inf"]
        buckets = [(bound, float(total)) for bound, total in zip(bounds, totals, strict=True)]
        yield HistogramMetricFamily(
            "graphrunner_inter_token_seconds", "Between two tokens of a request", buckets, self._gap_sum_s
        )


class StepTokens(Collector):
    """Tokens that steps computed and verified, and how many drafts stood, by request and round. One writer."""

    def __init__(self) -> None:
        self._num_tokens = self._num_padding = self._num_drafts = 0
        self._counts = [0] * (len(_BOUNDS_DRAFTS) + 1)
        self._num_accepted = 0

    def add(self, num_tokens: int, num_padding: int, num_drafts: int, accepted_lengths: Sequence[int]) -> None:
        """Count one step; `accepted_lengths` has an entry for each request whose drafts it verified."""
        self._num_tokens += num_tokens
        self._num_padding += num_padding
        self._num_drafts += num_drafts
        for length in accepted_lengths:
            self._counts[bisect_left(_BOUNDS_DRAFTS, length)] += 1
            self._num_accepted += length

    def collect(self) -> Iterator[Metric]:
        """The families, for a registry."""
        yield CounterMetricFamily("graphrunner_tokens", "Tokens computed", value=self._num_tokens)
        padding = "Tokens computed for nobody"
        yield CounterMetricFamily("graphrunner_padding_tokens", padding, value=self._num_padding)
        yield CounterMetricFamily("graphrunner_draft_tokens", "Draft tokens verified", value=self._num_drafts)
        stand = "Draft tokens that stand"
        yield CounterMetricFamily("graphrunner_draft_tokens_accepted", stand, value=self._num_accepted)
        totals = accumulate(self._counts)
        bounds = [f"{bound:.1f}" for bound in _BOUNDS_DRAFTS] + ["+Inf"]
        buckets = [(bound, float(total)) for bound, total in zip(bounds, totals, strict=True)]
        yield HistogramMetricFamily(
            "graphrunner_draft_accepted_length",
            "Draft tokens that stand, by request and round",
            buckets,
            self._num_accepted,
        )
