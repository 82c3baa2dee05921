"""The runner surface: can_run_graph -> load_batch -> execute, the same for every forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.graph_miss import GraphMiss
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.core.shape_key import ForwardVariant, ShapeKey

Forward = Callable[[ForwardBatch, ForwardVariant], ModelOutput]
"""What a runner is given instead of a model: gathers, model, logits and, by variant, sampling."""


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """A batch in place, ready to execute.

    Attributes:
        key: the padded shape; for eager the exact one.
        batch: views into the runner's own buffers, padded to `key`.
        num_reqs, num_tokens: the real counts, to cut the outputs.

    Aliasing: the views are overwritten by the next `load_batch` of the same runner.
    """

    key: ShapeKey
    batch: ForwardBatch
    num_reqs: int
    num_tokens: int


class BaseRunner(ABC):
    """One owner of one kind of forward pass. Called in order by `ModelRunner.forward`; holds no state of a step."""

    name: str

    @abstractmethod
    def graph_miss_reason(self, batch: ScheduledBatch) -> GraphMiss | None:
        """Why this runner cannot take the batch as a graph; None when it can. Host integers only, no sync."""

    def can_run_graph(self, batch: ScheduledBatch) -> bool:
        """Whether `graph_miss_reason` has nothing to say."""
        return self.graph_miss_reason(batch) is None

    @abstractmethod
    def load_batch(self, batch: ScheduledBatch) -> LoadedBatch:
        """Pick the key, pad to it, fill this runner's static buffers, let attention prepare its metadata."""

    @abstractmethod
    def execute(self, loaded: LoadedBatch) -> ModelOutput:
        """Run (replay or call) and return outputs cut to the real rows. Sync: none."""
