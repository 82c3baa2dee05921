"""WHICH runner takes a batch. Holds no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.runner.base_runner import BaseRunner

_OFF = GraphMiss(GraphMissReason.OFF)


class Selection(NamedTuple):
    """Who runs, and why it is not the graph runner meant for this kind of step (None when it is)."""

    runner: BaseRunner
    miss: GraphMiss | None
    missed_by: str = ""


def select_runner(runners: Sequence[BaseRunner], batch: ScheduledBatch, eager: BaseRunner) -> Selection:
    """The first runner whose miss reason is None, else eager.

    A runner that does not take this kind of step says MODE, and a phase without graphs says OFF; the reason reported
    is that of the runner meant for the step.
    """
    miss, missed_by = _OFF, ""
    for runner in runners:
        reason = runner.graph_miss_reason(batch)
        if reason is None:
            return Selection(runner, None)
        is_meant = reason.reason not in (GraphMissReason.MODE, GraphMissReason.OFF)
        if is_meant or (reason.reason is GraphMissReason.OFF and not missed_by):
            miss, missed_by = reason, runner.name
    return Selection(eager, miss, missed_by)
