"""What the HTTP front counts; the engine's own metrics are joined to them at /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class FrontMetrics:
    """One registry a server, so that two servers in a process do not mix."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self.requests = Counter(
            "graphrunner_http_requests", "Answered requests", ["route", "status"], registry=registry
        )
        self.disconnects = Counter(
            "graphrunner_http_disconnects", "Clients that left before their answer was complete", registry=registry
        )
        self.sequences = Gauge("graphrunner_http_sequences", "Outputs being made or waited for", registry=registry)
        self.e2e_s = Histogram(
            "graphrunner_http_generation_seconds",
            "From the checked request to its last token",
            buckets=_LONG_S,
            registry=registry,
        )

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)
