"""What draft runners share: rows in, everything else from the request table and from what the target left behind.

A draft runner takes one step's worth of drafts for the rows of a batch. Its recording reads row numbers that the host
loads, and device tensors of the round that `take` methods copy in; positions, slots and lengths it derives itself,
after the target's step has moved the rows on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
from graphrunner.runner.draft_rows import place_round_for, place_step_for, store_drafts_for
from graphrunner.runner.gather_rows import make_derived
from graphrunner.runner.graph_account import GraphAccount
from graphrunner.runner.prepared import with_metadata
from graphrunner.runner.round_inputs import RoundInputs
from graphrunner.runner.runner_context import RunnerContext
from graphrunner.runner.static_buffers import DECODE_BUFFERS, StaticBuffers

DRAFT_VARIANTS = (ForwardVariant.GREEDY, ForwardVariant.SAMPLE)


@dataclass(frozen=True, slots=True)
class DraftCapture:
    """What every draft runner is built with, whatever it drafts.

    Attributes:
        context: of the proposer: its own KV layers.
        backend, account, sizes, is_lazy, is_poisoning: see `BaseGraphRunner`.
        max_token_id: the vocabulary's last.
    """

    context: RunnerContext
    backend: ExecutionBackend
    account: GraphAccount
    sizes: tuple[int, ...]
    max_token_id: int
    is_lazy: bool = False
    is_poisoning: bool = False


class BaseDraftRunner(BaseGraphRunner):
    """Sizes count requests; `num_tokens / num_reqs` of a key is the batch's query length, one of `widths`.

    Args:
        capture: what all draft runners have.
        widths: query lengths to record, rising.
        width_inside: tokens a request in the recording's own views, when that is not the batch's query length.
        name: in records and metrics.

    Attributes:
        max_reqs: most requests of a step, recorded or not.
    """

    modes = frozenset({ForwardMode.DECODE, ForwardMode.VERIFY})
    needed_support = GraphSupport.UNIFORM
    can_rehearse = True

    def __init__(
        self, capture: DraftCapture, *, widths: Sequence[int], width_inside: int | None = None, name: str
    ) -> None:
        context, account = capture.context, capture.account
        super().__init__(
            context, capture.backend, account, capture.sizes, is_lazy=capture.is_lazy,
            is_poisoning=capture.is_poisoning,
        )  # fmt: skip
        self.name = name
        self.widths = tuple(widths)
        self._width_inside = width_inside
        self.max_reqs = max(self.sizes[-1], context.table.max_num_seqs)
        self._max_width = width_inside or self.widths[-1]
        self._max_token_id = capture.max_token_id
        device = context.device
        traced = capture.backend.is_traced
        self._place_step = place_step_for(device, is_traced=traced)
        self._place_round = place_round_for(device, is_traced=traced)
        self._store_drafts = store_drafts_for(device, is_traced=traced)
        self._keys = {
            (size, width, variant): ShapeKey(size * width, size, variant)
            for size in self.sizes
            for width in self.widths
            for variant in DRAFT_VARIANTS
        }
        self.buffers = StaticBuffers(
            self.max_reqs, self.max_reqs, device, context.attention.pad_seq_len, specs=DECODE_BUFFERS
        )
        self._held: tuple[tuple[int, ...], int] = ((), 0)  # rows in the buffer, and how far it is padded
        # What the last run was of, and its batch: the next one is nearly always of the same.
        self._served: tuple[tuple[int, ...], ForwardMode, int, SamplingNeed] | None = None
        self._loaded_last: LoadedBatch
        self.derived = make_derived(self.max_reqs * self._max_width, self.max_reqs, device)
        self._last_tokens = torch.zeros(self.max_reqs, dtype=torch.int64, device=device)
        # Of every width, so that no recording has to multiply; rows of whole 16 bytes, as kernels are compiled for.
        self._starts = starts_of(self.max_reqs, self._max_width, device)
        account.limits(name, f"largest captured size {self.sizes[-1]}, recorded widths {self.widths}")

    @abstractmethod
    def poison_inputs(self, value: int) -> None:
        """Overwrite what `take` fills."""

    def all_keys(self) -> Iterable[ShapeKey]:
        """Every size in every width and variant."""
        return self._keys.values()

    def shape_miss_reason(self, batch: ScheduledBatch) -> GraphMiss | None:
        """See `BaseGraphRunner.shape_miss_reason`."""
        width = self._width_of(batch)
        if width not in self.widths or batch.num_tokens != batch.num_reqs * batch.max_query_len:
            return GraphMiss(GraphMissReason.QUERY_LEN, width, self.widths[-1])
        if batch.num_reqs > self.sizes[-1]:
            return GraphMiss(GraphMissReason.NUM_REQS, batch.num_reqs, self.sizes[-1])
        return None

    def load_batch(self, batch: ScheduledBatch) -> LoadedBatch:
        """Write the row numbers, unless they are there already. See `BaseRunner.load_batch`."""
        key = self._make_graph_key(batch)
        assert key is not None, f"{batch.num_reqs} requests exceed the largest captured size {self.sizes[-1]}"
        self._load_rows(batch, key)
        views = self._loaded(key, batch).batch
        return LoadedBatch(key, views, batch.num_reqs, batch.num_reqs * self._width_of(batch))

    def run(self, batch: ScheduledBatch) -> ModelOutput:
        """Replay, or call the same closure over the exact shape where no recording serves. Sync: none."""
        kind = batch.rows, batch.mode, batch.max_query_len, batch.sampling_need
        if kind == self._served and batch.max_seq_len <= self.context.max_seq_len:
            return self.execute(self._loaded_last)
        miss = self.graph_miss_reason(batch)
        if miss is None:
            self._loaded_last = self.load_batch(batch)
            self._served = None if self.backend.has_eager_breaks else kind
            return self.execute(self._loaded_last)
        assert batch.num_reqs <= self.max_reqs, f"{batch.num_reqs} requests, the table holds {self.max_reqs}"
        self.account.missed(self.name, miss)
        key = ShapeKey(batch.num_reqs * self._width_of(batch), batch.num_reqs, variant_of(batch))
        self._load_rows(batch, key)
        return self.forward_over(self._views_of(key), key.variant)

    def capture_prepare(self, key: ShapeKey) -> ForwardBatch:
        """Views of one shape, all rows the dummy row."""
        self.poison(0)
        return self._views_of(key)

    def close(self) -> None:
        """See `BaseGraphRunner.close`."""
        self._served = None
        super().close()

    def poison(self, value: int) -> None:
        """See `BaseGraphRunner.poison`."""
        self.buffers.poison(value)
        self._held, self._served = ((), 0), None
        derived = self.derived
        for tensor in (derived.input_ids, derived.positions, derived.slot_mapping, derived.seq_lens):
            tensor.fill_(value)
        self._last_tokens.fill_(value)
        self.poison_inputs(value)

    def place_step(self, views: ForwardBatch, tokens: torch.Tensor, shift: int) -> None:
        """See `draft_rows.place_step`."""
        context = self.context
        self._place_step(context.table, views, tokens, shift, context.page_size, self._max_token_id)

    def first_tokens(self, views: ForwardBatch, num_tokens: int, tree_mask: torch.Tensor) -> ForwardBatch:
        """Views of a step of that many tokens a request that branch, over the same buffers.

        Args:
            tree_mask: uint8 [R, num_tokens, num_tokens]; see `ForwardBatch.tree_mask`.
        """
        num_reqs, total = views.num_reqs, views.num_reqs * num_tokens
        step = replace(
            views,
            mode=ForwardMode.VERIFY if num_tokens > 1 else ForwardMode.DECODE,
            input_ids=views.input_ids[:total],
            positions=views.positions[:total],
            slot_mapping=views.slot_mapping[:total],
            query_start_loc=self._starts[num_tokens, : num_reqs + 1],
            num_tokens=total,
            max_query_len=num_tokens,
            tree_mask=tree_mask.contiguous() if num_tokens > 1 else None,
        )
        return with_metadata(step)

    def place_round(self, views: ForwardBatch, inputs: RoundInputs) -> None:
        """See `draft_rows.place_round`."""
        context, num_new = self.context, inputs.num_new[: views.num_reqs]
        self._place_round(context.table, views, inputs.token_ids, num_new, context.page_size, self._max_token_id)

    def store_drafts(self, request_rows: torch.Tensor, drafts: Sequence[torch.Tensor]) -> None:
        """See `draft_rows.store_drafts`; int32 [R] each, in order."""
        self._store_drafts(self.context.table, request_rows, torch.stack([*drafts], dim=1))

    def _views_of(self, key: ShapeKey) -> ForwardBatch:
        num_reqs, context = key.num_reqs, self.context
        width = self._width_inside or key.num_tokens // num_reqs
        num_tokens, derived = num_reqs * width, self.derived
        views = ForwardBatch(
            mode=ForwardMode.DECODE if width == 1 else ForwardMode.VERIFY,
            input_ids=derived.input_ids[:num_tokens],
            positions=derived.positions[:num_tokens],
            slot_mapping=derived.slot_mapping[:num_tokens],
            request_rows=self.buffers.view("request_rows", num_reqs, num_reqs),
            seq_lens=derived.seq_lens[:num_reqs],
            query_start_loc=self._starts[width, : num_reqs + 1],
            page_table=context.table.page_table,
            logits_indices=self._last_tokens[:num_reqs],
            kv_layers=context.kv_layers,
            attention=context.attention,
            attention_metadata=None,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            max_query_len=width,
            max_seq_len=context.max_seq_len,
        )
        return with_metadata(views)

    def _load_rows(self, batch: ScheduledBatch, key: ShapeKey) -> None:
        wanted = (batch.rows, key.num_reqs)
        if wanted == self._held:
            return
        self._held, self._served = wanted, None
        columns = {"request_rows": np.asarray(batch.rows, np.int32)}
        self.buffers.load(columns, batch.num_reqs, key.num_reqs, key.num_reqs)

    def _make_graph_key(self, batch: ScheduledBatch) -> ShapeKey | None:
        size = bucket_for(batch.num_reqs, self.sizes)
        return None if size is None else self._keys[size, self._width_of(batch), variant_of(batch)]

    def _width_of(self, batch: ScheduledBatch) -> int:
        """Tokens a request that are taken of a uniform step: all, or where only one ever is, its newest."""
        return 1 if self.widths == (1,) else batch.max_query_len


def starts_of(max_reqs: int, max_width: int, device: torch.device) -> torch.Tensor:
    """int32 [max_width + 1, more than max_reqs]: where each request begins, by width."""
    requests = torch.arange(max_reqs // 4 * 4 + 4, dtype=torch.int32, device=device)
    return torch.arange(max_width + 1, dtype=torch.int32, device=device).unsqueeze(1) * requests


def draft_batch(batch: ScheduledBatch) -> ScheduledBatch:
    """What drafts can follow row by row: a uniform step itself, else a decode step of the rows that got a token."""
    if batch.mode in (ForwardMode.DECODE, ForwardMode.VERIFY):
        return batch
    chosen = [index for index, samples in enumerate(batch.samples) if samples]
    rows = tuple(batch.rows[i] for i in chosen)
    return ScheduledBatch(
        step_id=batch.step_id,
        mode=ForwardMode.DECODE,
        request_ids=tuple(batch.request_ids[i] for i in chosen),
        rows=rows,
        cached_lens=tuple(batch.cached_lens[i] + batch.query_lens[i] - 1 for i in chosen),
        query_lens=(1,) * len(rows),
        input_ids=(),
        samples=(True,) * len(rows),
        sampling_need=batch.sampling_need,
        needs_hidden_states=batch.needs_hidden_states,
    )


def variant_of(batch: ScheduledBatch) -> ForwardVariant:
    """Drafts of greedy requests are argmaxes; others follow the noise of their request."""
    return ForwardVariant.GREEDY if batch.sampling_need is SamplingNeed.GREEDY else ForwardVariant.SAMPLE
