"""WHICH runner takes a batch. Holds no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.runner.base_runner import BaseRunner


@dataclass(frozen=True, slots=True)
class Selection:
    """Who runs, and why it is not the graph runner meant for this kind of step (None when it is)."""

    runner: BaseRunner
    miss: GraphMiss | None
    missed_by: str = ""


def select_runner(runners: Sequence[BaseRunner], batch: ScheduledBatch, eager: BaseRunner) -> Selection:
    """The first runner whose miss reason is None, else eager.

    A runner that does not take this kind of step says MODE; the reason reported is that of the one that does.
    """
    miss, missed_by = GraphMiss(GraphMissReason.OFF), ""
    for runner in runners:
        reason = runner.graph_miss_reason(batch)
        if reason is None:
            return Selection(runner, None)
        if reason.reason is not GraphMissReason.MODE:
            miss, missed_by = reason, runner.name
    return Selection(eager, miss, missed_by)
