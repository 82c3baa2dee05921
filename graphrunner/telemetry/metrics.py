"""What the engine counts, in Prometheus' form. Usable without a server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.graph_miss import GraphMissReason
from graphrunner.core.outputs import StepRecord
from graphrunner.core.shape_key import ShapeKey
from graphrunner.telemetry.token_counts import StepTokens, TokenCounts


class EngineMetrics:
    """Counters of one engine, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._steps = Counter(
            "graphrunner_steps", "Steps, by runner, key and miss reason", ["runner", "key", "miss"], registry=registry
        )
        self._step_s = Histogram(
            "graphrunner_step_seconds",
            "Wall time of a step",
            ["runner"],
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1),
            registry=registry,
        )
        self._first_token_s = Histogram(
            "graphrunner_time_to_first_token_seconds",
            "From admission to the first token",
            buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
            registry=registry,
        )
        self._token_counts = TokenCounts()
        registry.register(self._token_counts)
        self.add_tokens = self._token_counts.add
        self._prompt_tokens = Counter("graphrunner_prompt_tokens", "Tokens of prompts", registry=registry)
        self._cached_tokens = Counter(
            "graphrunner_prompt_tokens_cached", "Tokens of prompts found in the prefix cache", registry=registry
        )
        self._finished = Counter("graphrunner_requests_finished", "Ended sequences", ["reason"], registry=registry)
        self._step_tokens = StepTokens()
        registry.register(self._step_tokens)
        # Of one kind of step.
        self._series: dict[tuple[str, ShapeKey | None, GraphMissReason | None], tuple[Counter, Histogram]] = {}
        self._num_preemptions_seen = 0
        self._preemptions = Counter("graphrunner_preemptions", "Requests that lost their pages", registry=registry)
        self._running = Gauge("graphrunner_requests_running", "Requests with pages", registry=registry)
        self._waiting = Gauge("graphrunner_requests_waiting", "Requests without pages", registry=registry)
        self._used_pages = Gauge("graphrunner_kv_pages_used", "KV pages of live requests", registry=registry)
        self._cached_pages = Gauge(
            "graphrunner_kv_pages_cached", "KV pages that only the prefix cache holds", registry=registry
        )
        self._pages = Gauge("graphrunner_kv_pages", "KV pages that can be handed out", registry=registry)
        self._graphs = Gauge("graphrunner_graphs", "Recorded shapes", registry=registry)
        self._graph_memory = Gauge(
            "graphrunner_graph_memory_bytes", "Device memory that recorded shapes hold", registry=registry
        )

    def add_step(self, record: StepRecord) -> None:
        """Count a finished step."""
        # Eager keys are exact sizes: one label for all of them keeps the number of series bounded.
        miss = record.miss_reason.reason if record.miss_reason else None
        kind = record.runner, record.key if record.is_graph else None, miss
        series = self._series.get(kind)
        if series is None:
            key, name = str(record.key) if record.is_graph else "exact", miss.name if miss else ""
            steps = self._steps.labels(record.runner, key, name)
            series = self._series[kind] = (steps, self._step_s.labels(record.runner))
        series[0].inc()
        series[1].observe(record.duration_ms / 1e3)
        accepted = record.accepted_lengths
        self._step_tokens.add(record.num_tokens, record.num_padding_tokens, record.num_drafts, accepted)

    def add_first_token(self, waited_s: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count a sequence whose first token came, `waited_s` after it was admitted."""
        self._first_token_s.observe(waited_s)
        self._prompt_tokens.inc(num_prompt_tokens)
        self._cached_tokens.inc(num_cached_tokens)

    def add_embedding(self, num_prompt_tokens: int) -> None:
        """Count a prompt that became a vector."""
        self._prompt_tokens.inc(num_prompt_tokens)

    def add_finished(self, reason: str) -> None:
        """Count an ended sequence: stop, length, abort or error."""
        self._finished.labels(reason).inc()

    def text(self, stats: EngineStats | None = None) -> bytes:
        """The exposition format, with the gauges of `stats`."""
        if stats is not None:
            self._running.set(stats.num_running)
            self._waiting.set(stats.num_waiting)
            self._used_pages.set(stats.num_used_pages)
            self._cached_pages.set(stats.num_cached_pages)
            self._pages.set(stats.num_pages)
            self._graphs.set(stats.num_graphs)
            self._graph_memory.set(stats.graph_memory_bytes)
            # A new engine behind the same front counts from 0 again.
            self._preemptions.inc(max(0, stats.num_preemptions - self._num_preemptions_seen))
            self._num_preemptions_seen = stats.num_preemptions
        return generate_latest(self.registry)
