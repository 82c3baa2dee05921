"""What the engine counts, in Prometheus' form. Usable without a server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.outputs import StepRecord


class EngineMetrics:
    """Counters of one engine, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._steps = Counter(
            "graphrunner_steps", "Steps, by runner, key and miss reason", ["runner", "key", "miss"], registry=registry
        )
        self._step_ms = Histogram(
            "graphrunner_step_milliseconds",
            "Wall time of a step",
            ["runner"],
            buckets=(0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
            registry=registry,
        )
        self._tokens = Counter("graphrunner_tokens", "Tokens computed", registry=registry)
        self._padding = Counter("graphrunner_padding_tokens", "Tokens computed for nobody", registry=registry)
        self._running = Gauge("graphrunner_requests_running", "Requests with pages", registry=registry)
        self._waiting = Gauge("graphrunner_requests_waiting", "Requests without pages", registry=registry)
        self._used_pages = Gauge("graphrunner_kv_pages_used", "KV pages of live requests", registry=registry)
        self._pages = Gauge("graphrunner_kv_pages", "KV pages that can be handed out", registry=registry)

    def add_step(self, record: StepRecord) -> None:
        """Count a finished step."""
        miss = record.miss_reason.reason.name if record.miss_reason else ""
        # Eager keys are exact sizes: one label for all of them keeps the number of series bounded.
        key = str(record.key) if record.is_graph else "exact"
        self._steps.labels(record.runner, key, miss).inc()
        self._step_ms.labels(record.runner).observe(record.duration_ms)
        self._tokens.inc(record.num_tokens)
        self._padding.inc(record.num_padding_tokens)

    def text(self, stats: EngineStats | None = None) -> bytes:
        """The exposition format, with the gauges of `stats`."""
        if stats is not None:
            self._running.set(stats.num_running)
            self._waiting.set(stats.num_waiting)
            self._used_pages.set(stats.num_used_pages)
            self._pages.set(stats.num_pages)
        return generate_latest(self.registry)
