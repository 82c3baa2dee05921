"""Decode steps from a recording: one query token a request, everything gathered on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.scheduled_batch import SamplingNeed, ScheduledBatch
from graphrunner.core.shape_key import ForwardMode, ForwardVariant, ShapeKey
from graphrunner.execution.backend import ExecutionBackend
from graphrunner.runner.base_graph_runner import BaseGraphRunner
from graphrunner.runner.base_runner import LoadedBatch
from graphrunner.runner.capture_sizes import bucket_for
from graphrunner.runner.gather_rows import DerivedBuffers, gather_decode, make_derived
from graphrunner.runner.graph_account import GraphAccount
from graphrunner.runner.runner_context import RunnerContext, with_metadata

_VARIANT_OF_NEED = {
    SamplingNeed.GREEDY: ForwardVariant.GREEDY,
    SamplingNeed.RANDOM: ForwardVariant.SAMPLE,
    SamplingNeed.LOGITS: ForwardVariant.LOGITS,
}


class DecodeCudaGraphRunner(BaseGraphRunner):
    """Sizes count requests. The only loaded buffer is `request_rows`: a step whose rows did not change loads nothing.

    Args:
        variants: what is recorded; LOGITS must be among them and serves every need.
    """

    name = "decode_cuda_graph_runner"

    def __init__(
        self,
        context: RunnerContext,
        backend: ExecutionBackend,
        account: GraphAccount,
        sizes: Sequence[int],
        *,
        variants: Sequence[ForwardVariant] = tuple(_VARIANT_OF_NEED.values()),
        is_lazy: bool = False,
    ) -> None:
        super().__init__(context, backend, account, sizes, is_lazy=is_lazy)
        assert ForwardVariant.LOGITS in variants, "every batch must have a variant that serves it"
        self._variants = tuple(variants)
        largest = self.sizes[-1]
        self.request_rows = torch.zeros(largest, dtype=torch.int32, device=context.device)
        self._query_start_loc = torch.arange(largest + 1, dtype=torch.int32, device=context.device)
        self._logits_indices = torch.arange(largest, dtype=torch.int64, device=context.device)
        self._derived = make_derived(largest, largest, context.device)
        self._held_rows: tuple[int, ...] = ()

    def all_keys(self) -> Iterable[ShapeKey]:
        """Every size in every variant."""
        return (ShapeKey(size, size, variant) for size in self.sizes for variant in self._variants)

    def graph_miss_reason(self, batch: ScheduledBatch) -> GraphMiss | None:
        """See `BaseRunner.graph_miss_reason`."""
        if batch.mode is not ForwardMode.DECODE:
            return GraphMiss(GraphMissReason.MODE)
        if batch.max_query_len != 1:
            return GraphMiss(GraphMissReason.QUERY_LEN, batch.max_query_len, 1)
        key = self._make_graph_key(batch)
        if key is None:
            return GraphMiss(GraphMissReason.NUM_REQS, batch.num_reqs, self.sizes[-1])
        if self.backend.can_run(key):
            return None
        if self._is_failed(key):
            return GraphMiss(GraphMissReason.CAPTURE_FAILED)
        if self.is_lazy:
            self._wanted.append(key)
        return GraphMiss(GraphMissReason.NOT_CAPTURED)

    def load_batch(self, batch: ScheduledBatch) -> LoadedBatch:
        """Write the row numbers, unless they are there already. See `BaseRunner.load_batch`."""
        key = self._make_graph_key(batch)
        assert key is not None, f"{batch.num_reqs} requests exceed the largest captured size {self.sizes[-1]}"
        padded = batch.rows + (0,) * (key.num_reqs - batch.num_reqs)
        if padded != self._held_rows:
            self.request_rows[: key.num_reqs].copy_(torch.tensor(padded, dtype=torch.int32), non_blocking=True)
            self._held_rows = padded
        return LoadedBatch(key, self._views[key], batch.num_reqs, batch.num_tokens)

    def capture_prepare(self, key: ShapeKey) -> ForwardBatch:
        """Views of one size, all rows the dummy row."""
        size, context = key.num_reqs, self.context
        self.request_rows.zero_()
        self._held_rows = ()
        views = ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=self._derived.input_ids[:size],
            positions=self._derived.positions[:size],
            slot_mapping=self._derived.slot_mapping[:size],
            request_rows=self.request_rows[:size],
            seq_lens=self._derived.seq_lens[:size],
            query_start_loc=self._query_start_loc[: size + 1],
            page_table=context.table.page_table,
            logits_indices=self._logits_indices[:size],
            kv_layers=context.kv_layers,
            attention=context.attention,
            attention_metadata=None,
            num_tokens=size,
            num_reqs=size,
            max_query_len=1,
            max_seq_len=context.max_seq_len,
        )
        return with_metadata(views)

    def forward_over(self, views: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """Gather the rows, run, write lengths (and tokens, when picked here) back. In graph."""
        table = self.context.table
        out = DerivedBuffers(views.input_ids, views.positions, views.slot_mapping, views.seq_lens)
        gather_decode(table, views.request_rows, self.context.page_size, out)
        output = self.context.forward(views, variant)
        table.store_lengths(views.request_rows, views.seq_lens)
        if output.token_ids is not None:
            table.store_tokens(views.request_rows, output.token_ids)
        return output

    def _make_graph_key(self, batch: ScheduledBatch) -> ShapeKey | None:
        size = bucket_for(batch.num_reqs, self.sizes)
        if size is None:
            return None
        wanted = _VARIANT_OF_NEED[batch.sampling_need]
        return ShapeKey(size, size, wanted if wanted in self._variants else ForwardVariant.LOGITS)
