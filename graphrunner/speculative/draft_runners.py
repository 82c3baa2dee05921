"""What every runner of a device proposer is built from."""

from __future__ import annotations

from graphrunner.execution.backend import ExecutionBackend
from graphrunner.execution.recording import RecordingBackend
from graphrunner.runner.graph_account import GraphAccount
from graphrunner.runner.runner_context import RunnerContext
from graphrunner.speculative.proposer import ProposerContext


class RunnerParts:
    """Backends and sizes.

    Attributes:
        is_recorded: whether the engine is to record the runners; else their closures are called.
        max_reqs: most requests of a step.
    """

    def __init__(self, context: ProposerContext) -> None:
        self._context = context
        self._first_backend = context.new_backend()
        self.is_recorded = self._first_backend is not None
        self.max_reqs = max(context.sizes[-1], context.runner_context.table.max_num_seqs)

    def of_runner(
        self, context: RunnerContext | None = None
    ) -> tuple[RunnerContext, ExecutionBackend, GraphAccount, tuple[int, ...]]:
        """The arguments that all graph runners begin with, a backend of their own among them."""
        backend, self._first_backend = self._first_backend, None
        if backend is None and self.is_recorded:
            backend = self._context.new_backend()
        given = self._context
        return context or given.runner_context, backend or RecordingBackend(), given.account, given.sizes
