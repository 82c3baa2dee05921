"""A scheduler in miniature: pages, rows, slots, and a `ForwardBatch` for whatever tokens a test wants next."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import torch

from graphrunner.attention.backend import AttentionBackend
from graphrunner.core.active_batch import active_batch
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.shape_key import ForwardMode
from graphrunner.kvcache.pool import KVPool


@dataclass
class Sequence:
    """Tokens whose KV is written, and the pages that hold it."""

    row: int
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class PagedDriver:
    """Runs a model over sequences that share one pool.

    Pages are handed out in a shuffled order and the pool starts as NaN, so code that assumes neighbours or reads what
    it does not own is found out.
    """

    def __init__(
        self,
        model,
        attention: AttentionBackend,
        *,
        num_pages=160,
        page_size=4,
        max_len=128,
        max_rows=9,
        cache_dtype=None,
    ):
        self.model = model
        self.attention = attention
        self.page_size = page_size
        self.max_len = max_len
        dtype, device = model.options.dtype, model.options.device
        self.pool = KVPool(model.kv_spec, num_pages, page_size, cache_dtype or dtype, device)
        self.pool.poison(float("nan"))
        self.page_table = torch.zeros(max_rows, -(-max_len // page_size), dtype=torch.int32, device=device)
        self.free_pages = list(range(1, num_pages))
        random.Random(7).shuffle(self.free_pages)
        self.sequences: dict[str, Sequence] = {}

    def new(self, name: str, shared_with: str | None = None, num_shared_pages: int = 0) -> None:
        """Start a sequence, optionally on the first pages of another one."""
        sequence = Sequence(row=len(self.sequences) + 1)
        if shared_with is not None:
            donor = self.sequences[shared_with]
            sequence.pages = donor.pages[:num_shared_pages]
            sequence.tokens = donor.tokens[: num_shared_pages * self.page_size]
        self.sequences[name] = sequence
        self._write_row(sequence)

    def step(self, chunks: dict[str, list[int]], *, num_padding_tokens=0, num_padding_reqs=0, all_rows=False):
        """Compute `chunks` in one forward; float32 logits [len(chunks), V], or [T, V] with all_rows."""
        batch = self.batch(chunks, num_padding_tokens, num_padding_reqs)
        with torch.inference_mode(), active_batch(batch):
            if all_rows:
                logits = self.model.logits(self.model(batch))
                return logits[: sum(len(chunk) for chunk in chunks.values())]
            hidden = self.model(batch, only_logits_rows=True)
            return self.model.logits(hidden)[: len(chunks)]

    def batch(self, chunks: dict[str, list[int]], num_padding_tokens=0, num_padding_reqs=0) -> ForwardBatch:
        """Grow the sequences by `chunks` and describe the step."""
        ids, positions, slots, rows, seq_lens, starts = [], [], [], [], [], [0]
        for name, chunk in chunks.items():
            sequence = self.sequences[name]
            first = len(sequence.tokens)
            sequence.tokens += chunk
            while len(sequence.pages) * self.page_size < len(sequence.tokens):
                sequence.pages.append(self.free_pages.pop())
            self._write_row(sequence)
            for position in range(first, len(sequence.tokens)):
                page, offset = divmod(position, self.page_size)
                slots.append(sequence.pages[page] * self.page_size + offset)
                positions.append(position)
            ids += chunk
            rows.append(sequence.row)
            seq_lens.append(len(sequence.tokens))
            starts.append(len(ids))
        lasts = [start - 1 for start in starts[1:]]
        query_lens = [len(chunk) for chunk in chunks.values()]
        is_decode = max(query_lens) == 1
        if is_decode:
            num_padding_tokens = num_padding_reqs
        starts += [starts[-1] + is_decode * (i + 1) for i in range(num_padding_reqs)]
        for column in (ids, positions, slots):
            column.extend([0] * num_padding_tokens)
        for column, value in ((rows, 0), (seq_lens, self.attention.pad_seq_len), (lasts, 0)):
            column.extend([value] * num_padding_reqs)
        batch = ForwardBatch(
            mode=ForwardMode.DECODE if is_decode else ForwardMode.MIXED,
            input_ids=self._tensor(ids, torch.int32),
            positions=self._tensor(positions, torch.int64),
            slot_mapping=self._tensor(slots, torch.int64),
            request_rows=self._tensor(rows, torch.int32),
            seq_lens=self._tensor(seq_lens, torch.int32),
            query_start_loc=self._tensor(starts, torch.int32),
            page_table=self.page_table,
            logits_indices=self._tensor(lasts, torch.int64),
            kv_layers=self.pool.layers,
            attention=self.attention,
            attention_metadata=None,
            num_tokens=len(ids),
            num_reqs=len(rows),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        )
        return replace(batch, attention_metadata=self.attention.prepare_metadata(batch))

    def greedy(self, prompts: dict[str, list[int]], num_tokens: int, num_padding_reqs=0):
        """Prefill all prompts in one flat batch, then decode together: tokens and logits by sequence."""
        for name in prompts:
            if name not in self.sequences:
                self.new(name)
        logits = self.step(prompts)
        return self.decode(list(prompts), logits, num_tokens, num_padding_reqs)

    def decode(self, names: list[str], logits: torch.Tensor, num_tokens: int, num_padding_reqs=0):
        """Continue from the logits of the last prompt token: (tokens, logits [num_tokens, V]) by sequence."""
        tokens: dict[str, list[int]] = {name: [] for name in names}
        history = []
        for step in range(num_tokens):
            history.append(logits)
            picked = logits.argmax(-1).tolist()
            for name, token in zip(names, picked, strict=True):
                tokens[name].append(token)
            if step < num_tokens - 1:
                chunks = {name: [token] for name, token in zip(names, picked, strict=True)}
                logits = self.step(chunks, num_padding_reqs=num_padding_reqs)
        stacked = torch.stack(history, dim=1)
        return tokens, dict(zip(names, stacked, strict=True))

    def _write_row(self, sequence: Sequence) -> None:
        row = self.page_table[sequence.row]
        row.zero_()
        row[: len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)

    def _tensor(self, values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.page_table.device)
