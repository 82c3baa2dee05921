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
        tokens_per_s: output tokens over the last seconds.
        num_preemptions: requests that gave their pages back so far.
        graph_coverage: share of the last steps that replayed a graph, 0 to 1.
    """

    steps: tuple[StepRecord, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    num_used_pages: int = 0
    num_pages: int = 0
    tokens_per_s: float = 0.0
    graph_coverage: float = 0.0
    num_preemptions: int = 0
