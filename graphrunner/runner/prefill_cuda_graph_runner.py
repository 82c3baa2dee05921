"""Prefill and mixed steps from a recording: token buckets, several requests, logits after the graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from graphrunner.attention.backend import GraphSupport
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.graph_miss import GraphMiss
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.core.shape_key import ForwardMode, ForwardVariant, ShapeKey
from graphrunner.execution.backend import ExecutionBackend
from graphrunner.runner.base_graph_runner import BaseGraphRunner
from graphrunner.runner.base_runner import LoadedBatch
from graphrunner.runner.capture_sizes import bucket_for, prefill_miss_reason
from graphrunner.runner.gather_rows import DerivedBuffers, gather_tokens, make_derived
from graphrunner.runner.graph_account import GraphAccount
from graphrunner.runner.prepared import with_metadata
from graphrunner.runner.runner_context import RunnerContext
from graphrunner.runner.static_buffers import StaticBuffers, token_columns


class PrefillCudaGraphRunner(BaseGraphRunner):
    """Sizes count tokens. The body is recorded up to the hidden states; logits are computed for the real rows only.

    Args:
        max_reqs: most requests in one step.
        name: in records and metrics.
    """

    modes = frozenset({ForwardMode.PREFILL, ForwardMode.MIXED})
    needed_support = GraphSupport.ALWAYS
    can_rehearse = True

    def __init__(
        self,
        context: RunnerContext,
        backend: ExecutionBackend,
        account: GraphAccount,
        sizes: Sequence[int],
        *,
        max_reqs: int,
        name: str = "prefill_cuda_graph_runner",
        is_lazy: bool = False,
        is_poisoning: bool = False,
    ) -> None:
        super().__init__(context, backend, account, sizes, is_lazy=is_lazy, is_poisoning=is_poisoning)
        self.name = name
        self._max_reqs = max_reqs
        largest = self.sizes[-1]
        self._keys = {size: ShapeKey(size, min(size, max_reqs), ForwardVariant.HIDDEN) for size in self.sizes}
        self.buffers = StaticBuffers(largest, min(largest, max_reqs), context.device, context.attention.pad_seq_len)
        self._derived = make_derived(largest, 1, context.device)
        account.limits(name, f"largest captured size {largest} tokens, {max_reqs} requests")

    def all_keys(self) -> Iterable[ShapeKey]:
        """Every token bucket."""
        return self._keys.values()

    def shape_miss_reason(self, batch: ScheduledBatch) -> GraphMiss | None:
        """See `BaseGraphRunner.shape_miss_reason`."""
        return prefill_miss_reason(batch, self.sizes, self._max_reqs)

    def load_batch(self, batch: ScheduledBatch) -> LoadedBatch:
        """Fill every static buffer, padded to the bucket. See `BaseRunner.load_batch`."""
        key = self._make_graph_key(batch)
        assert key is not None, f"{batch.num_tokens} tokens exceed the largest captured size {self.sizes[-1]}"
        self.buffers.load(token_columns(batch), batch.num_tokens, key.num_tokens, key.num_reqs)
        return self._loaded(key, batch)

    def execute(self, loaded: LoadedBatch) -> ModelOutput:
        """Replay the body, then the tail on the rows whose logits are wanted."""
        output = super().execute(loaded)
        assert output.hidden_states is not None
        rows = loaded.batch.logits_indices[: loaded.num_reqs]
        logits = self.context.tail(output.hidden_states.index_select(0, rows)).logits
        return replace(output, logits=logits)

    def capture_prepare(self, key: ShapeKey) -> ForwardBatch:
        """Views of one bucket, padding only."""
        context, num_tokens, num_reqs = self.context, key.num_tokens, key.num_reqs
        self.buffers.load({}, 0, num_tokens, num_reqs)
        views = {name: self.buffers.view(name, num_tokens, num_reqs) for name in self.buffers.tensors}
        batch = ForwardBatch(
            mode=ForwardMode.MIXED,
            input_ids=self._derived.input_ids[:num_tokens],
            positions=views["positions"],
            slot_mapping=self._derived.slot_mapping[:num_tokens],
            request_rows=views["request_rows"],
            seq_lens=views["seq_lens"],
            query_start_loc=views["query_start_loc"],
            page_table=context.table.page_table,
            logits_indices=views["logits_indices"],
            kv_layers=context.kv_layers,
            attention=context.attention,
            attention_metadata=None,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            max_query_len=num_tokens,
            max_seq_len=context.max_seq_len,
        )
        return with_metadata(batch)

    def forward_over(self, views: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """Fill in what only the device knows, run the body, write lengths back. In graph."""
        context, num_tokens = self.context, views.num_tokens
        out = DerivedBuffers(views.input_ids, views.positions, views.slot_mapping, views.seq_lens)
        input_ids, token_rows = (self.buffers.tensors[name][:num_tokens] for name in ("input_ids", "token_rows"))
        gather_tokens(
            context.table, input_ids, token_rows, positions=views.positions, page_size=context.page_size, out=out
        )
        output = context.forward(views, variant)
        context.table.store_lengths(views.request_rows, views.seq_lens)
        return output

    def poison(self, value: int) -> None:
        """See `BaseGraphRunner.poison`."""
        self.buffers.poison(value)
        self._derived.input_ids.fill_(value)
        self._derived.slot_mapping.fill_(value)

    def _make_graph_key(self, batch: ScheduledBatch) -> ShapeKey | None:
        size = bucket_for(batch.num_tokens, self.sizes)
        return None if size is None or batch.num_reqs > self._max_reqs else self._keys[size]
