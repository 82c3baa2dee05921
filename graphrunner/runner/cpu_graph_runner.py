"""Decode, prefill and mixed steps on the host, where the loader reaches everything a forward reads.

The request table is host memory here, so ids, slots and lengths are put in place by the loader, and what is recorded is
the forward alone: no gathers before it, no stores after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from graphrunner.attention.backend import GraphSupport
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.scheduled_batch import SamplingNeed, ScheduledBatch
from graphrunner.core.shape_key import ForwardMode, ForwardVariant, ShapeKey
from graphrunner.execution.backend import ExecutionBackend
from graphrunner.runner.base_graph_runner import BaseGraphRunner
from graphrunner.runner.base_runner import LoadedBatch
from graphrunner.runner.capture_sizes import bucket_for, prefill_miss_reason
from graphrunner.runner.graph_account import GraphAccount
from graphrunner.runner.prepared import with_metadata
from graphrunner.runner.runner_context import RunnerContext
from graphrunner.runner.static_buffers import HOST_BUFFERS, Columns, StaticBuffers, token_columns

_VARIANT_OF_NEED = {
    SamplingNeed.GREEDY: ForwardVariant.GREEDY,
    SamplingNeed.RANDOM: ForwardVariant.SAMPLE,
    SamplingNeed.LOGITS: ForwardVariant.LOGITS,
}


class CPUGraphRunner(BaseGraphRunner):
    """One runner for both phases; it may stand in both places of a `ModelRunner`.

    Args:
        sizes: requests of a decode step; empty leaves those steps to another runner.
        prefill_sizes: tokens of a prefill or mixed step; empty leaves those steps to the eager runner.
        max_reqs: most requests in one step.
        variants: what a recorded decode step ends with; LOGITS must be among them and serves every need.
        name: in records and metrics.
    """

    def __init__(
        self,
        context: RunnerContext,
        backend: ExecutionBackend,
        account: GraphAccount,
        sizes: Sequence[int],
        *,
        prefill_sizes: Sequence[int] = (),
        max_reqs: int,
        variants: Sequence[ForwardVariant] = tuple(_VARIANT_OF_NEED.values()),
        name: str = "cpu_graph_runner",
        is_lazy: bool = False,
        is_poisoning: bool = False,
    ) -> None:
        super().__init__(context, backend, account, sizes, is_lazy=is_lazy, is_poisoning=is_poisoning)
        assert context.device.type == "cpu", f"the loader writes host memory, not that of {context.device}"
        assert ForwardVariant.LOGITS in variants, "every batch must have a variant that serves it"
        self.name = name
        prompts = {ForwardMode.PREFILL, ForwardMode.MIXED} if prefill_sizes else set()
        self.modes = frozenset({*prompts, *({ForwardMode.DECODE} if sizes else ())})
        self.needed_support = GraphSupport.ALWAYS if prefill_sizes else GraphSupport.DECODE
        self.prefill_sizes = tuple(prefill_sizes)
        self._max_reqs = max_reqs
        self._decode_keys = {
            (size, variant): ShapeKey(size, size, variant) for size in self.sizes for variant in variants
        }
        self._prefill_keys = {s: ShapeKey(s, min(s, max_reqs), ForwardVariant.HIDDEN) for s in self.prefill_sizes}
        largest = max(self.sizes, default=0)
        most_tokens = max(largest, *self.prefill_sizes, 0)
        most_reqs = max(largest, min(most_tokens, max_reqs))
        pad_len = context.attention.pad_seq_len
        self.buffers = StaticBuffers(most_tokens, most_reqs, context.device, pad_len, specs=HOST_BUFFERS)
        self._last_token, self._num_computed = context.table.last_token.numpy(), context.table.num_computed.numpy()
        self._page_table = context.table.page_table.numpy()
        self._count_up = np.arange(largest + 1)
        account.limits(name, f"largest captured size {largest}, max_num_seqs {context.table.max_num_seqs}")

    def all_keys(self) -> Iterable[ShapeKey]:
        """Decode sizes in every variant, then token buckets."""
        return (*self._decode_keys.values(), *self._prefill_keys.values())

    def shape_miss_reason(self, batch: ScheduledBatch) -> GraphMiss | None:
        """See `BaseGraphRunner.shape_miss_reason`."""
        if batch.mode is ForwardMode.DECODE:
            if batch.max_query_len != 1:
                return GraphMiss(GraphMissReason.QUERY_LEN, batch.max_query_len, 1)
            if batch.num_reqs > self.sizes[-1]:
                return GraphMiss(GraphMissReason.NUM_REQS, batch.num_reqs, self.sizes[-1])
            return None
        return prefill_miss_reason(batch, self.prefill_sizes, self._max_reqs)

    def load_batch(self, batch: ScheduledBatch) -> LoadedBatch:
        """Write everything the forward reads. See `BaseRunner.load_batch`."""
        key = self._make_graph_key(batch)
        assert key is not None, f"no captured size holds {batch.num_tokens} tokens of {batch.num_reqs} requests"
        columns = (
            self._decode_columns(batch, key.num_reqs) if batch.mode is ForwardMode.DECODE else self._columns(batch)
        )
        self.buffers.load(columns, batch.num_tokens, key.num_tokens, key.num_reqs)
        return self._loaded(key, batch)

    def execute(self, loaded: LoadedBatch) -> ModelOutput:
        """Replay; then advance the request table, and compute logits where the recording ends before them."""
        output = super().execute(loaded)
        batch, num_reqs = loaded.batch, loaded.num_reqs
        rows = batch.request_rows[:num_reqs].numpy()
        self._num_computed[rows] = batch.seq_lens[:num_reqs].numpy()
        if output.token_ids is not None:
            self._last_token[rows] = output.token_ids.numpy()
        if loaded.key.variant is not ForwardVariant.HIDDEN:
            return output
        assert output.hidden_states is not None, "a prompt's recording ends with hidden states"
        logits = self.context.tail(output.hidden_states.index_select(0, batch.logits_indices[:num_reqs])).logits
        return replace(output, logits=logits)

    def capture_prepare(self, key: ShapeKey) -> ForwardBatch:
        """Views of one shape, padding only."""
        context, num_tokens, num_reqs = self.context, key.num_tokens, key.num_reqs
        is_decode = key.variant is not ForwardVariant.HIDDEN
        columns = self._uniform_columns(num_reqs) if is_decode else {}
        self.buffers.load(columns, 0, num_tokens, num_reqs)
        views = {name: self.buffers.view(name, num_tokens, num_reqs) for name in self.buffers.tensors}
        batch = ForwardBatch(
            mode=ForwardMode.DECODE if is_decode else ForwardMode.MIXED,
            **views,
            page_table=context.table.page_table,
            kv_layers=context.kv_layers,
            attention=context.attention,
            attention_metadata=None,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            max_query_len=1 if is_decode else num_tokens,
            max_seq_len=context.max_seq_len,
        )
        return with_metadata(batch)

    def forward_over(self, views: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """The forward alone."""
        return self.context.forward(views, variant)

    def poison(self, value: int) -> None:
        """See `BaseGraphRunner.poison`."""
        self.buffers.poison(value)

    def _decode_columns(self, batch: ScheduledBatch, num_reqs: int) -> Columns:
        rows = np.asarray(batch.rows, np.int32)
        cached = np.asarray(batch.cached_lens, np.int64)
        return {
            "input_ids": self._last_token[rows],
            "positions": cached,
            "slot_mapping": self._slots(rows, cached),
            "request_rows": rows,
            "seq_lens": cached + 1,
            **self._uniform_columns(num_reqs),
        }

    def _uniform_columns(self, num_reqs: int) -> Columns:
        """A decode step's requests have one query each, padding included."""
        return {"query_start_loc": self._count_up[: num_reqs + 1], "logits_indices": self._count_up[:num_reqs]}

    def _columns(self, batch: ScheduledBatch) -> Columns:
        columns = token_columns(batch)
        rows, input_ids = columns["token_rows"], columns["input_ids"]
        ids = np.where(input_ids < 0, self._last_token[rows], input_ids)
        return {**columns, "input_ids": ids, "slot_mapping": self._slots(rows, columns["positions"])}

    def _slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        columns, offsets = np.divmod(positions, self.context.page_size)
        return self._page_table[rows, columns].astype(np.int64) * self.context.page_size + offsets

    def _make_graph_key(self, batch: ScheduledBatch) -> ShapeKey | None:
        if batch.mode is ForwardMode.DECODE:
            size = bucket_for(batch.num_reqs, self.sizes)
            if size is None:
                return None
            wanted = self._decode_keys.get((size, _VARIANT_OF_NEED[batch.sampling_need]))
            return wanted or self._decode_keys[size, ForwardVariant.LOGITS]
        size = bucket_for(batch.num_tokens, self.prefill_sizes)
        return None if size is None or batch.num_reqs > self._max_reqs else self._prefill_keys[size]
