"""The runner that takes everything: a key of exact size, nothing recorded."""

from __future__ import annotations

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.core.shape_key import ForwardVariant, ShapeKey
from graphrunner.runner.base_runner import BaseRunner, LoadedBatch
from graphrunner.runner.gather_rows import gather_tokens, make_derived
from graphrunner.runner.runner_context import RunnerContext, with_metadata
from graphrunner.runner.static_buffers import StaticBuffers


class EagerRunner(BaseRunner):
    """Runs any batch at its real size. It never replays, so its miss reason is that graphs are off."""

    name = "eager"

    def __init__(self, context: RunnerContext) -> None:
        self._context = context

    def graph_miss_reason(self, batch: ScheduledBatch) -> GraphMiss | None:
        """Always OFF: the selector falls back to this runner without asking."""
        return GraphMiss(GraphMissReason.OFF)

    def load_batch(self, batch: ScheduledBatch) -> LoadedBatch:
        """Fresh tensors of exact size. See `BaseRunner.load_batch`."""
        context, table = self._context, self._context.table
        num_tokens, num_reqs = batch.num_tokens, batch.num_reqs
        buffers = StaticBuffers(num_tokens, num_reqs, context.device, context.attention.pad_seq_len)
        buffers.load(batch, num_tokens, num_reqs)
        tensors = buffers.tensors
        derived = make_derived(num_tokens, num_reqs, context.device)
        gather_tokens(
            table, tensors["input_ids"], tensors["token_rows"], tensors["positions"], context.page_size, derived
        )
        wants_hidden = batch.needs_all_logits or batch.needs_hidden_states
        variant = ForwardVariant.HIDDEN if wants_hidden else ForwardVariant.LOGITS
        forward_batch = ForwardBatch(
            mode=batch.mode,
            input_ids=derived.input_ids,
            positions=tensors["positions"],
            slot_mapping=derived.slot_mapping,
            request_rows=tensors["request_rows"],
            seq_lens=tensors["seq_lens"],
            query_start_loc=tensors["query_start_loc"],
            page_table=table.page_table,
            logits_indices=tensors["logits_indices"],
            kv_layers=context.kv_layers,
            attention=context.attention,
            attention_metadata=None,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )
        return LoadedBatch(ShapeKey(num_tokens, num_reqs, variant), with_metadata(forward_batch), num_reqs, num_tokens)

    def execute(self, loaded: LoadedBatch) -> ModelOutput:
        """Call the forward. Logits are of one row a request, or of every token under HIDDEN."""
        batch = loaded.batch
        output = self._context.forward(batch, loaded.key.variant)
        self._context.table.store_lengths(batch.request_rows, batch.seq_lens)
        if loaded.key.variant is ForwardVariant.HIDDEN:
            assert output.hidden_states is not None
            logits = self._context.tail(output.hidden_states).logits
            return ModelOutput(logits=logits, hidden_states=output.hidden_states)
        return output
