"""What graph runners share: capture, keys, replay. A concrete runner says which shapes and what goes into them."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

from graphrunner.core.errors import CaptureError
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.core.shape_key import ForwardVariant, ShapeKey
from graphrunner.execution.backend import ExecutionBackend
from graphrunner.runner.base_runner import BaseRunner, LoadedBatch
from graphrunner.runner.graph_account import GraphAccount
from graphrunner.runner.runner_context import RunnerContext

OnCapture = Callable[[str, int, int], None]
"""(what is being captured, how many are done, how many there are)."""


class BaseGraphRunner(BaseRunner):
    """A runner with a recording for each key.

    Args:
        context: shared by all runners.
        backend: records and replays.
        account: where costs and replays are counted.
        sizes: in rising order; what a size counts is the concrete runner's business.
        is_lazy: record a key at its first use, between steps, instead of at `capture`.
    """

    def __init__(
        self,
        context: RunnerContext,
        backend: ExecutionBackend,
        account: GraphAccount,
        sizes: Sequence[int],
        *,
        is_lazy: bool = False,
    ) -> None:
        self.context = context
        self.backend = backend
        self.account = account
        self.sizes = tuple(sizes)
        self.is_lazy = is_lazy
        self._views: dict[ShapeKey, ForwardBatch] = {}
        self._failed: set[ShapeKey] = set()
        self._wanted: list[ShapeKey] = []

    @abstractmethod
    def all_keys(self) -> Iterable[ShapeKey]:
        """Every key of the capture list."""

    @abstractmethod
    def _make_graph_key(self, batch: ScheduledBatch) -> ShapeKey | None:
        """The padded key of a batch; None when no size holds it."""

    @abstractmethod
    def capture_prepare(self, key: ShapeKey) -> ForwardBatch:
        """Static views of one shape, loaded with padding only."""

    @abstractmethod
    def forward_over(self, views: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """What is recorded: gather, forward, write back; nothing but static views."""

    def capture(self, on_progress: OnCapture = lambda name, done, total: None) -> None:
        """Record every key of the list, largest first; nothing when lazy. A key that fails is served eagerly."""
        keys = sorted(self.all_keys(), key=lambda key: (-key.num_tokens, -key.num_reqs, key.variant.value))
        if self.is_lazy:
            return
        self._capture_all(keys, on_progress)

    def capture_pending(self) -> None:
        """Record what steps asked for and did not find (lazy capture). Called between steps."""
        if self._wanted:
            keys, self._wanted = list(dict.fromkeys(self._wanted)), []
            self._capture_all(keys, lambda name, done, total: None)

    def capture_one_shape(self, key: ShapeKey) -> None:
        """Record one key. Raises CaptureError."""
        views = self.capture_prepare(key)
        stats = self.backend.capture_one(key, lambda: self.forward_over(views, key.variant))
        self._views[key] = views
        self.account.captured(self.name, key, stats)

    def execute(self, loaded: LoadedBatch) -> ModelOutput:
        """Replay and cut to the real rows. Aliasing: see `ModelOutput`."""
        output = self._replay_graph(loaded)
        self.account.replayed(self.name, loaded.key, loaded.num_tokens)
        return output

    def close(self) -> None:
        """Give the recordings back. Idempotent; `capture` may follow."""
        self.backend.close()
        self._views.clear()
        self._failed.clear()

    def _capture_all(self, keys: Sequence[ShapeKey], on_progress: OnCapture) -> None:
        # A collection in the middle of a recording may free device memory that the recording uses.
        gc.collect()
        with self.backend.capture_session():
            for index, key in enumerate(keys):
                on_progress(f"{self.name} {key}", index, len(keys))
                try:
                    self.capture_one_shape(key)
                except CaptureError as error:
                    self._failed.add(key)
                    self.account.failed(self.name, key, str(error))
        on_progress(self.name, len(keys), len(keys))

    def _is_failed(self, key: ShapeKey) -> bool:
        return key in self._failed

    def _replay_graph(self, loaded: LoadedBatch) -> ModelOutput:
        with self.backend.replay_session():
            output = self.backend.replay(loaded.key)
        num_reqs, num_tokens = loaded.num_reqs, loaded.num_tokens
        return ModelOutput(
            logits=None if output.logits is None else output.logits[:num_reqs],
            token_ids=None if output.token_ids is None else output.token_ids[:num_reqs],
            hidden_states=None if output.hidden_states is None else output.hidden_states[:num_tokens],
        )
