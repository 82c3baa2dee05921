"""What graph runners share: capture, keys, replay. A concrete runner says which shapes and what goes into them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch

from graphrunner.attention.backend import GraphSupport
from graphrunner.core.active_batch import active_batch
from graphrunner.core.errors import CaptureError
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.core.shape_key import ForwardMode, ForwardVariant, ShapeKey
from graphrunner.device.registry import device_of
from graphrunner.execution.backend import ExecutionBackend, capture_error
from graphrunner.runner.base_runner import BaseRunner, LoadedBatch
from graphrunner.runner.graph_account import GraphAccount
from graphrunner.runner.prepared import with_metadata
from graphrunner.runner.runner_context import RunnerContext
from graphrunner.runner.static_buffers import StaticBuffers
from graphrunner.telemetry import ranges
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)

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
        is_poisoning: overwrite a replay's outputs when the next one starts, so that a late reader is loud.

    Attributes:
        modes: the steps it takes.
        needed_support: what its attention must be able to do inside a graph.
        buffers: what its loads fill.
        can_rehearse: whether its forward may run, on padding, with kernels that leave their results unwritten: what
            torch itself looks up by one of these is clamped.
    """

    modes: frozenset[ForwardMode]
    can_rehearse = False
    needed_support: GraphSupport
    buffers: StaticBuffers

    def __init__(
        self,
        context: RunnerContext,
        backend: ExecutionBackend,
        account: GraphAccount,
        sizes: Sequence[int],
        *,
        is_lazy: bool = False,
        is_poisoning: bool = False,
    ) -> None:
        assert list(sizes) == sorted(set(sizes)), f"capture sizes must rise: {sizes}"
        self.context = context
        self.backend = backend
        self.account = account
        self.sizes = tuple(sizes)
        self.is_lazy = is_lazy
        self._is_poisoning = is_poisoning
        self._views: dict[ShapeKey, ForwardBatch] = {}
        self._failed: set[ShapeKey] = set()
        self._wanted: dict[ShapeKey, None] = {}
        self._last_output: ModelOutput | None = None
        # By key, the output last cut, the requests and tokens it was cut to, and the views: one entry a recording.
        self._cuts: dict[ShapeKey, tuple[ModelOutput, int, int, ModelOutput]] = {}

    @abstractmethod
    def all_keys(self) -> Iterable[ShapeKey]:
        """Every key of the capture list."""

    @abstractmethod
    def shape_miss_reason(self, batch: ScheduledBatch) -> GraphMiss | None:
        """Why no key of the list fits a batch whose mode does; None when one does."""

    @abstractmethod
    def _make_graph_key(self, batch: ScheduledBatch) -> ShapeKey | None:
        """The padded key of a batch; None when no size holds it."""

    @abstractmethod
    def capture_prepare(self, key: ShapeKey) -> ForwardBatch:
        """Static views of one shape, loaded with padding only."""

    @abstractmethod
    def forward_over(self, views: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """What is recorded: gather, forward, write back; nothing but static views."""

    @abstractmethod
    def poison(self, value: int) -> None:
        """Overwrite every static buffer, as if nothing had been loaded: what a load does not write shows."""

    def graph_miss_reason(self, batch: ScheduledBatch) -> GraphMiss | None:
        """See `BaseRunner.graph_miss_reason`. A key that lazy capture still owes is recorded before the next step."""
        if batch.mode not in self.modes:
            return GraphMiss(GraphMissReason.MODE)
        if batch.needs_all_logits:
            return GraphMiss(GraphMissReason.ALL_LOGITS)
        if batch.max_seq_len > self.context.max_seq_len:
            return GraphMiss(GraphMissReason.SEQ_LEN, batch.max_seq_len, self.context.max_seq_len)
        miss = self.shape_miss_reason(batch)
        if miss is not None:
            return miss
        key = self._make_graph_key(batch)
        assert key is not None, "a batch that no size holds has a shape miss"
        return None if self.backend.can_run(key) else self._key_miss_reason(key)

    def capture(self, on_progress: OnCapture = lambda name, done, total: None) -> None:
        """Record every key of the list, largest first, so that smaller ones fit into the memory of larger ones.

        Nothing when lazy; keys that are recorded already stay. A key that fails is reported and served eagerly.
        """
        if self.is_lazy or not self._is_attention_able():
            return
        keys = [key for key in self.all_keys() if not self.backend.can_run(key)]
        self._capture_all(keys, on_progress)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run the forwards of the list that launch all of its kernels, where `can_rehearse` says so."""
        for key in self.telling_keys():
            self.forward_over(self.capture_prepare(key), key.variant)

    def telling_keys(self) -> Sequence[ShapeKey]:
        """Those of the list that launch all of its kernels; none where nothing is rehearsed.

        Sizes between two powers of two share their kernels, but for what is cut to fill the card: both ends are among
        them. Without LOGITS, whose kernels are among those of SAMPLE.
        """
        if self.is_lazy or not self.can_rehearse or self.backend.is_traced or not self._is_attention_able():
            return ()
        keys = list(self.all_keys())
        ends: dict[tuple[ForwardVariant, int, int], tuple[ShapeKey, ShapeKey]] = {}
        for key in [key for key in keys if key.variant is not ForwardVariant.LOGITS] or keys:
            # Of runners whose sizes count tokens, the quotient has two values in a power of two, or a few.
            group = key.variant, key.num_tokens // key.num_reqs, (key.num_tokens - 1).bit_length()
            ends[group] = (ends.get(group, (key, key))[0], key)
        return tuple(dict.fromkeys(key for pair in ends.values() for key in pair))

    def capture_pending(self) -> None:
        """Record what steps asked for and did not find (lazy capture). Called between steps."""
        if self._wanted:
            keys, self._wanted = list(self._wanted), {}
            self._capture_all(keys, lambda name, done, total: None)

    def capture_one_shape(self, key: ShapeKey) -> None:
        """Record one key. Raises CaptureError."""
        try:
            views = self.capture_prepare(key)
        except Exception as cause:
            raise capture_error(key, cause) from cause
        with ranges.CAPTURE:
            stats = self.backend.capture_one(key, lambda: self.forward_over(views, key.variant))
        self._views[key] = views
        self.account.captured(self.name, key, stats)

    def execute(self, loaded: LoadedBatch) -> ModelOutput:
        """Replay and cut to the real rows. Aliasing: see `ModelOutput`."""
        if self._is_poisoning and self._last_output is not None:
            poison_output(self._last_output)
        output = self._replay_graph(loaded)
        self._last_output = output
        self.account.replayed(self.name, loaded.key, loaded.num_tokens)
        return output

    def count_nodes(self) -> None:
        """Tell the account what a backend counts only at a replay."""
        for key in self._views:
            if num_nodes := self.backend.num_nodes(key):
                self.account.counted(self.name, key, num_nodes)

    def close(self) -> None:
        """Give the recordings back. Idempotent; `capture` may follow."""
        self.backend.close()
        self._views.clear()
        self._failed.clear()
        self._wanted.clear()
        self._cuts.clear()
        self._last_output = None

    def _replay_graph(self, loaded: LoadedBatch) -> ModelOutput:
        if self.backend.has_eager_breaks:
            with active_batch(loaded.batch), self.backend.replay_session():
                output = self.backend.replay(loaded.key)
        else:
            output = self.backend.replay(loaded.key)
        num_reqs, num_tokens = loaded.num_reqs, loaded.num_tokens
        if num_reqs == loaded.key.num_reqs and num_tokens == loaded.key.num_tokens:
            return output  # nothing is padding
        known = self._cuts.get(loaded.key)
        if known is None or known[0] is not output or known[1:3] != (num_reqs, num_tokens):
            known = self._cuts[loaded.key] = (output, num_reqs, num_tokens, self._cut_to(loaded, output))
        return known[3]

    def _cut_to(self, loaded: LoadedBatch, output: ModelOutput) -> ModelOutput:
        num_reqs, num_tokens = loaded.num_reqs, loaded.num_tokens
        return ModelOutput(
            logits=_cut(output.logits, num_tokens if loaded.batch.mode is ForwardMode.VERIFY else num_reqs),
            token_ids=_cut(output.token_ids, num_reqs),
            num_new=_cut(output.num_new, num_reqs),
            hidden_states=_cut(output.hidden_states, num_tokens),
            aux_hidden_states=_cut(output.aux_hidden_states, num_tokens),
        )

    def _loaded(self, key: ShapeKey, batch: ScheduledBatch) -> LoadedBatch:
        """The views of a key, with metadata of this step where a part of the forward runs in Python."""
        views = self._views[key]
        if self.backend.has_eager_breaks:
            views = with_metadata(views)
        return LoadedBatch(key, views, batch.num_reqs, batch.num_tokens)

    def _key_miss_reason(self, key: ShapeKey) -> GraphMiss:
        if not self._is_attention_able():
            return GraphMiss(GraphMissReason.ATTENTION)
        if key in self._failed:
            return GraphMiss(GraphMissReason.CAPTURE_FAILED)
        if self.is_lazy:
            self._wanted[key] = None
        return GraphMiss(GraphMissReason.NOT_CAPTURED)

    def _is_attention_able(self) -> bool:
        return self.backend.has_eager_breaks or self.context.attention.graph_support >= self.needed_support

    @torch.inference_mode()
    def _capture_all(self, keys: Sequence[ShapeKey], on_progress: OnCapture) -> None:
        device = device_of(self.context.device)
        keys = sorted(keys, key=lambda key: (-key.num_tokens, -key.num_reqs, key.variant.value))
        failures: dict[ShapeKey, str] = {}
        with self.backend.capture_session():
            for index, key in enumerate(keys):
                on_progress(f"{self.name} {key}, {device.free_bytes() >> 20} MiB free", index, len(keys))
                try:
                    self.capture_one_shape(key)
                except CaptureError as error:
                    failures[key] = str(error)
        self._failed |= set(failures)
        self.account.failed(self.name, failures, len(keys))
        on_progress(self.name, len(keys), len(keys))


def _cut(tensor: torch.Tensor | None, num_rows: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[:num_rows]


def poison_output(output: ModelOutput) -> None:
    """Overwrite with NaN, or with a token id that no vocabulary has."""
    whole = (output.logits, output.hidden_states, output.aux_hidden_states, output.token_ids, output.num_new)
    for tensor in whole:
        if tensor is not None:
            tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
