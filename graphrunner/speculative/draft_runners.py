"""What every runner of a device proposer is built from."""

from __future__ import annotations

from graphrunner.execution.recording import RecordingBackend
from graphrunner.runner.base_draft_runner import DraftCapture
from graphrunner.runner.runner_context import RunnerContext
from graphrunner.speculative.proposer import ProposerContext


class RunnerParts:
    """Backends and sizes.

    Args:
        max_token_id: the target's last.

    Attributes:
        is_recorded: whether the engine is to record the runners; else their closures are called.
        max_reqs: most requests of a step.
    """

    def __init__(self, context: ProposerContext, max_token_id: int) -> None:
        self._context, self._max_token_id = context, max_token_id
        self._first_backend = context.new_backend()
        self.is_recorded = self._first_backend is not None
        self.max_reqs = max(context.sizes[-1], context.runner_context.table.max_num_seqs)

    def of_runner(self, context: RunnerContext | None = None) -> DraftCapture:
        """What one more runner is built with, a backend of its own among it.

        Args:
            context: None is the proposer's.
        """
        backend, self._first_backend = self._first_backend, None
        if backend is None and self.is_recorded:
            backend = self._context.new_backend()
        given = self._context
        return DraftCapture(
            context or given.runner_context,
            backend or RecordingBackend(),
            given.account,
            given.sizes,
            self._max_token_id,
            is_lazy=given.is_lazy,
        )
