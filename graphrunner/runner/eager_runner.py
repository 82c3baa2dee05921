"""The runner that takes everything: a key of exact size, nothing recorded."""

from __future__ import annotations

from dataclasses import replace

import torch

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.scheduled_batch import SamplingNeed, ScheduledBatch
from graphrunner.core.shape_key import ForwardMode, ForwardVariant, ShapeKey
from graphrunner.device.transfer import to_device
from graphrunner.runner.base_runner import BaseRunner, LoadedBatch
from graphrunner.runner.gather_rows import DerivedBuffers, gather_for, gather_tokens, make_derived
from graphrunner.runner.prepared import with_metadata
from graphrunner.runner.runner_context import RunnerContext
from graphrunner.runner.static_buffers import StaticBuffers, token_columns
from graphrunner.runner.tree_step import TreeStep


class EagerRunner(BaseRunner):
    """Runs any batch at its real size. It never replays, so its miss reason is that graphs are off.

    Its buffers grow with the largest batch seen: nothing is recorded on them, so they may move.
    """

    name = "eager"

    def __init__(self, context: RunnerContext) -> None:
        self._context = context
        self._buffers: StaticBuffers | None = None
        self._derived = make_derived(0, 0, context.device)

    def graph_miss_reason(self, batch: ScheduledBatch) -> GraphMiss | None:
        """Always OFF: the selector falls back to this runner without asking."""
        return GraphMiss(GraphMissReason.OFF)

    def load_batch(self, batch: ScheduledBatch) -> LoadedBatch:
        """Views of exact size. See `BaseRunner.load_batch`."""
        if batch.mode is ForwardMode.VERIFY:
            return self._load_verify(batch)
        context, num_tokens, num_reqs = self._context, batch.num_tokens, batch.num_reqs
        buffers = self._buffers_for(num_tokens, num_reqs)
        buffers.load(token_columns(batch), num_tokens, num_tokens, num_reqs)
        views = {name: buffers.view(name, num_tokens, num_reqs) for name in buffers.tensors}
        input_ids, slots = self._derived.input_ids[:num_tokens], self._derived.slot_mapping[:num_tokens]
        derived = DerivedBuffers(input_ids, views["positions"], slots, views["seq_lens"])
        gather_tokens(
            context.table,
            views["input_ids"],
            views["token_rows"],
            positions=views["positions"],
            page_size=context.page_size,
            out=derived,
        )
        forward_batch = ForwardBatch(
            mode=batch.mode,
            input_ids=input_ids,
            positions=views["positions"],
            slot_mapping=slots,
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
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )
        wants_hidden = batch.needs_all_logits or batch.needs_hidden_states or context.needs_hidden_states
        key = ShapeKey(num_tokens, num_reqs, ForwardVariant.HIDDEN if wants_hidden else ForwardVariant.LOGITS)
        return LoadedBatch(key, with_metadata(forward_batch), num_reqs, num_tokens)

    def execute(self, loaded: LoadedBatch) -> ModelOutput:
        """Call the forward. Logits are of one row a request; who wants more finds the hidden states of every token."""
        batch = loaded.batch
        output = self._context.forward(batch, loaded.key.variant)
        if batch.mode is ForwardMode.VERIFY:
            # Otherwise how far the rows move on is known when drafts are accepted.
            if output.token_ids is not None and output.num_new is not None:
                self._context.table.store_accepted(batch.request_rows, output.token_ids, output.num_new)
            return output
        self._context.table.store_lengths(batch.request_rows, batch.seq_lens)
        if loaded.key.variant is ForwardVariant.HIDDEN:
            assert output.hidden_states is not None
            hidden = output.hidden_states
            return replace(output, logits=self._context.tail(hidden.index_select(0, batch.logits_indices)).logits)
        return output

    def _load_verify(self, batch: ScheduledBatch) -> LoadedBatch:
        """A uniform step in fresh buffers: rare, and of any size."""
        context, device = self._context, self._context.device
        num_tokens, num_reqs, width = batch.num_tokens, batch.num_reqs, batch.max_query_len
        rows = to_device(torch.tensor(batch.rows, dtype=torch.int32), device)
        counts = to_device(torch.tensor(batch.num_draft_tokens, dtype=torch.int32), device)
        derived = make_derived(num_tokens, num_reqs, device, width)
        gather_for(device)(context.table, rows, counts, context.page_size, derived)
        forward_batch = ForwardBatch(
            mode=batch.mode,
            input_ids=derived.input_ids,
            positions=derived.positions,
            slot_mapping=derived.slot_mapping,
            request_rows=rows,
            seq_lens=derived.seq_lens,
            query_start_loc=torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * width,
            page_table=context.table.page_table,
            logits_indices=torch.arange(num_tokens, dtype=torch.int64, device=device),
            kv_layers=context.kv_layers,
            attention=context.attention,
            attention_metadata=None,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            max_query_len=width,
            max_seq_len=batch.max_seq_len,
            draft_tokens=derived.draft_tokens,
        )
        variant = ForwardVariant.LOGITS
        if context.draft_tree is not None:
            # Which path stands, and the KV of it, is the forward's own business.
            tree = TreeStep(context.draft_tree, num_reqs, device)
            forward_batch = replace(forward_batch, tree_mask=tree.mask, tree_parents=tree.parents)
            tree.place(forward_batch, context.table)
            is_greedy = batch.sampling_need is SamplingNeed.GREEDY
            variant = ForwardVariant.GREEDY if is_greedy else ForwardVariant.SAMPLE
        key = ShapeKey(num_tokens, num_reqs, variant)
        return LoadedBatch(key, with_metadata(forward_batch), num_reqs, num_tokens)

    def _buffers_for(self, num_tokens: int, num_reqs: int) -> StaticBuffers:
        buffers = self._buffers
        if buffers is None or num_tokens > buffers.max_tokens or num_reqs > buffers.max_reqs:
            context = self._context
            num_tokens, num_reqs = _power_of_two(num_tokens), _power_of_two(num_reqs)
            buffers = StaticBuffers(num_tokens, num_reqs, context.device, context.attention.pad_seq_len)
            self._buffers, self._derived = buffers, make_derived(num_tokens, num_reqs, context.device)
        return buffers


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
