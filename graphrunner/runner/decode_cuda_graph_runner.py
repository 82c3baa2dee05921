"""Decode and target-verify steps from a recording: a fixed number of query tokens a request, gathered on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from graphrunner.attention.backend import GraphSupport
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.scheduled_batch import SamplingNeed, ScheduledBatch
from graphrunner.core.shape_key import ForwardMode, ForwardVariant, ShapeKey
from graphrunner.execution.backend import ExecutionBackend
from graphrunner.runner.base_graph_runner import BaseGraphRunner
from graphrunner.runner.base_runner import LoadedBatch
from graphrunner.runner.capture_sizes import bucket_for
from graphrunner.runner.gather_rows import (
    DerivedBuffers,
    advance_accepted_for,
    advance_for,
    gather_for,
    make_derived,
)
from graphrunner.runner.graph_account import GraphAccount
from graphrunner.runner.prepared import with_metadata
from graphrunner.runner.round_inputs import RoundKeeper
from graphrunner.runner.runner_context import RunnerContext
from graphrunner.runner.static_buffers import DECODE_BUFFERS, VERIFY_BUFFERS, StaticBuffers
from graphrunner.runner.tree_step import TreeStep

VARIANT_OF_NEED = {
    SamplingNeed.GREEDY: ForwardVariant.GREEDY,
    SamplingNeed.RANDOM: ForwardVariant.SAMPLE,
    SamplingNeed.LOGITS: ForwardVariant.LOGITS,
}


_Kind = tuple[tuple[int, ...], tuple[int, ...], ForwardMode, int, SamplingNeed]
"""All of a step that its views depend on: rows, how many drafts each has, mode, width, need."""


class DecodeCudaGraphRunner(BaseGraphRunner):
    """Sizes count requests. A step whose rows did not change loads nothing: the recording advances the rows itself.

    Args:
        variants: what is recorded; LOGITS must be among them and serves every need.
        query_width: tokens a request; 1 is decode, k + 1 verifies k drafts. Where the forward picks tokens it accepts
            drafts too, and the recording moves the rows on by what stands; after LOGITS, whoever accepts does.
        keeper: has what a proposer reads of a verify step kept by the recording; None keeps nothing.
        name: in records and metrics.
    """

    can_rehearse = True

    def __init__(
        self,
        context: RunnerContext,
        backend: ExecutionBackend,
        account: GraphAccount,
        sizes: Sequence[int],
        *,
        variants: Sequence[ForwardVariant] = tuple(VARIANT_OF_NEED.values()),
        query_width: int = 1,
        keeper: RoundKeeper | None = None,
        name: str = "decode_cuda_graph_runner",
        is_lazy: bool = False,
        is_poisoning: bool = False,
    ) -> None:
        super().__init__(context, backend, account, sizes, is_lazy=is_lazy, is_poisoning=is_poisoning)
        assert ForwardVariant.LOGITS in variants, "every batch must have a variant that serves it"
        self.name = name
        self.query_width = query_width
        is_decode = query_width == 1
        self.modes = frozenset({ForwardMode.DECODE if is_decode else ForwardMode.VERIFY})
        self.needed_support = GraphSupport.DECODE if is_decode else GraphSupport.UNIFORM
        device, largest = context.device, self.sizes[-1]
        self._variants = tuple(variants)
        self._keys = {(size, v): ShapeKey(size * query_width, size, v) for size in self.sizes for v in self._variants}
        self.buffers = StaticBuffers(
            largest * query_width,
            largest,
            device,
            context.attention.pad_seq_len,
            specs=DECODE_BUFFERS if is_decode else VERIFY_BUFFERS,
        )
        self._query_start_loc = torch.arange(largest + 1, dtype=torch.int32, device=device) * query_width
        self._logits_indices = torch.arange(largest * query_width, dtype=torch.int64, device=device)
        self._derived = make_derived(largest * query_width, largest, device, query_width)
        tree = context.draft_tree if query_width > 1 else None
        self._tree = None if tree is None else TreeStep(tree, largest, device)
        traced = backend.is_traced
        self._keeper = None if traced else keeper
        self._gather = gather_for(device, is_traced=traced)
        self._advance = advance_for(device, largest, is_traced=traced)
        self._advance_accepted = advance_accepted_for(device, largest, query_width, is_traced=traced)
        self._held: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # rows and draft counts in the buffers
        self._served: _Kind | None = None  # what the last loaded step was of
        self._loaded_last: LoadedBatch
        account.limits(name, f"largest captured size {largest}, max_num_seqs {context.table.max_num_seqs}")

    def all_keys(self) -> Iterable[ShapeKey]:
        """Every size in every variant."""
        return self._keys.values()

    def shape_miss_reason(self, batch: ScheduledBatch) -> GraphMiss | None:
        """See `BaseGraphRunner.shape_miss_reason`."""
        width = self.query_width
        if batch.max_query_len != width or batch.num_tokens != batch.num_reqs * width:
            return GraphMiss(GraphMissReason.QUERY_LEN, batch.max_query_len, width)
        if batch.num_reqs > self.sizes[-1]:
            return GraphMiss(GraphMissReason.NUM_REQS, batch.num_reqs, self.sizes[-1])
        return None

    def graph_miss_reason(self, batch: ScheduledBatch) -> GraphMiss | None:
        """See `BaseGraphRunner.graph_miss_reason`; a step like the one before is not looked at again."""
        is_same = self._kind_of(batch) == self._served and not batch.needs_all_logits
        if is_same and batch.max_seq_len <= self.context.max_seq_len:
            return None
        return super().graph_miss_reason(batch)

    def load_batch(self, batch: ScheduledBatch) -> LoadedBatch:
        """Write the row numbers (and how many drafts each has), unless they are there. See `BaseRunner.load_batch`."""
        kind = self._kind_of(batch)
        if kind == self._served:
            return self._loaded_last
        key = self._make_graph_key(batch)
        assert key is not None, f"{batch.num_reqs} requests exceed the largest captured size {self.sizes[-1]}"
        held = (batch.rows, batch.num_draft_tokens)
        if held != self._held:
            columns = {"request_rows": np.asarray(batch.rows, np.int32)}
            if self.query_width > 1:
                columns["num_drafts"] = np.asarray(batch.num_draft_tokens, np.int32)
            self.buffers.load(columns, batch.num_tokens, key.num_tokens, key.num_reqs)
            self._held = held
        self._loaded_last = self._loaded(key, batch)
        self._served = None if self.backend.has_eager_breaks else kind
        return self._loaded_last

    def capture_prepare(self, key: ShapeKey) -> ForwardBatch:
        """Views of one size, all rows the dummy row."""
        size, num_tokens, context = key.num_reqs, key.num_tokens, self.context
        self.poison(0)
        views = ForwardBatch(
            mode=ForwardMode.DECODE if self.query_width == 1 else ForwardMode.VERIFY,
            input_ids=self._derived.input_ids[:num_tokens],
            positions=self._derived.positions[:num_tokens],
            slot_mapping=self._derived.slot_mapping[:num_tokens],
            request_rows=self.buffers.view("request_rows", num_tokens, size),
            seq_lens=self._derived.seq_lens[:size],
            query_start_loc=self._query_start_loc[: size + 1],
            page_table=context.table.page_table,
            logits_indices=self._logits_indices[:num_tokens],
            kv_layers=context.kv_layers,
            attention=context.attention,
            attention_metadata=None,
            num_tokens=num_tokens,
            num_reqs=size,
            max_query_len=self.query_width,
            max_seq_len=context.max_seq_len,
            draft_tokens=None if self._derived.draft_tokens is None else self._derived.draft_tokens[:size],
            tree_mask=None if self._tree is None else self._tree.mask[:size],
            tree_parents=None if self._tree is None else self._tree.parents[:size],
        )
        return with_metadata(views)

    def forward_over(self, views: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """Gather the rows, run, write lengths (and tokens, when picked here) back. In graph."""
        context = self.context
        out = DerivedBuffers(views.input_ids, views.positions, views.slot_mapping, views.seq_lens, views.draft_tokens)
        counts = None
        if self.query_width > 1:
            counts = self.buffers.view("num_drafts", views.num_tokens, views.num_reqs)
        self._gather(context.table, views.request_rows, counts, context.page_size, out)
        if self._tree is not None:
            self._tree.place(views, context.table)
        output = context.forward(views, variant)
        if self.query_width > 1:
            if output.token_ids is not None and output.num_new is not None:
                self._advance_accepted(context.table, views.request_rows, output.token_ids, output.num_new)
                if self._keeper is not None:
                    return self._keeper.keep(views, output)
            return output
        if output.token_ids is None:
            context.table.store_lengths(views.request_rows, views.seq_lens)
        else:
            self._advance(context.table, views.request_rows, views.seq_lens, output.token_ids)
        return output

    def poison(self, value: int) -> None:
        """See `BaseGraphRunner.poison`. Rows must stay valid row numbers, so they are not held from here on."""
        self.buffers.poison(value)
        derived = self._derived
        for tensor in (derived.input_ids, derived.positions, derived.slot_mapping, derived.seq_lens):
            tensor.fill_(value)
        if derived.draft_tokens is not None:
            derived.draft_tokens.fill_(value)
        self._held, self._served = ((), ()), None

    def close(self) -> None:
        """See `BaseGraphRunner.close`."""
        self._served = None
        super().close()

    def _kind_of(self, batch: ScheduledBatch) -> _Kind:
        return batch.rows, batch.num_draft_tokens, batch.mode, batch.max_query_len, batch.sampling_need

    def _make_graph_key(self, batch: ScheduledBatch) -> ShapeKey | None:
        size = bucket_for(batch.num_reqs, self.sizes)
        if size is None:
            return None
        wanted = VARIANT_OF_NEED[batch.sampling_need]
        return self._keys.get((size, wanted)) or self._keys[size, ForwardVariant.LOGITS]
