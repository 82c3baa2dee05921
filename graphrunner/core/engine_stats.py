"""The engine at a glance: what a live page and a health check show."""

from dataclasses import dataclass

from graphrunner.core.outputs import StepRecord


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot, made by the engine between two steps.

    Attributes:
        steps: the last steps, oldest first.
        num_running, num_waiting: requests with and without pages.
        num_used_pages, num_pages: KV pages owned by live requests, and all that can be handed out.
        num_cached_pages: pages that only the prefix cache holds; they are given up when others are needed.
        tokens_per_s: tokens computed a second over the last steps, prompts included, padding not.
        num_output_tokens: tokens generated so far.
        num_graphs, graph_memory_bytes: recorded shapes, and what they hold on the device.
        num_preemptions: requests that gave their pages back so far.
        graph_coverage: share of the last steps that replayed a graph, 0 to 1.
        draft_acceptance: share of the last steps' draft tokens that stand, 0 to 1; None when none was verified.
        mean_accepted_length: draft tokens that stand, by request and round; None likewise.
    """

    steps: tuple[StepRecord, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    num_used_pages: int = 0
    num_pages: int = 0
    num_cached_pages: int = 0
    tokens_per_s: float = 0.0
    graph_coverage: float = 0.0
    draft_acceptance: float | None = None
    mean_accepted_length: float | None = None
    num_preemptions: int = 0
    num_output_tokens: int = 0
    num_graphs: int = 0
    graph_memory_bytes: int = 0
