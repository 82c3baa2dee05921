"""The static buffers: a table of what recorded forwards read, and the one loader that fills it.

docs/padding.md is this table in words; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.runner.staging import StagingBlock, aligned


class Axis(Enum):
    """What a buffer has one entry for."""

    TOKEN = "token"
    REQUEST = "request"
    REQUEST_PLUS_ONE = "request + 1"


class Pad(Enum):
    """Pad values that are not plain numbers."""

    REAL_TOKEN_COUNT = "the real token count"
    ATTENTION_PAD_LENGTH = "the attention backend's pad length"


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One row of the table."""

    name: str
    dtype: torch.dtype
    axis: Axis
    pad: int | Pad
    why_pad_is_safe: str


_REQUEST_ROWS = BufferSpec("request_rows", torch.int32, Axis.REQUEST, 0, "the dummy row: all its pages are page 0")
_TOKENS = (
    BufferSpec("input_ids", torch.int32, Axis.TOKEN, 0, "a valid id; the token's output is cut off"),
    BufferSpec("positions", torch.int64, Axis.TOKEN, 0, "a valid rope index; the token's output is cut off"),
)
_REQUESTS = (
    _REQUEST_ROWS,
    BufferSpec(
        "seq_lens",
        torch.int32,
        Axis.REQUEST,
        Pad.ATTENTION_PAD_LENGTH,
        "kernels neither divide by it nor wait on it",
    ),
    BufferSpec(
        "query_start_loc",
        torch.int32,
        Axis.REQUEST_PLUS_ONE,
        Pad.REAL_TOKEN_COUNT,
        "padding requests have no queries",
    ),
    BufferSpec("logits_indices", torch.int64, Axis.REQUEST, 0, "a valid token; the row's logits are cut off"),
)

TOKEN_BUFFERS: tuple[BufferSpec, ...] = (
    *_TOKENS,
    BufferSpec("token_rows", torch.int32, Axis.TOKEN, 0, "the dummy row: the token's KV goes to page 0"),
    *_REQUESTS,
)
"""Loaded for prefill, mixed and eager steps."""

DECODE_BUFFERS: tuple[BufferSpec, ...] = (_REQUEST_ROWS,)
"""Loaded for decode steps; everything else is derived from the request table on the device."""

VERIFY_BUFFERS: tuple[BufferSpec, ...] = (
    _REQUEST_ROWS,
    BufferSpec("num_drafts", torch.int32, Axis.REQUEST, 0, "the request verifies nothing; its output is cut off"),
)
"""Loaded for verify steps; the drafts themselves are in the request table."""

HOST_BUFFERS: tuple[BufferSpec, ...] = (
    *_TOKENS,
    BufferSpec("slot_mapping", torch.int64, Axis.TOKEN, 0, "the first slot of page 0, which nobody owns"),
    *_REQUESTS,
)
"""Loaded where the host reaches the request table itself: nothing is left to derive."""

_NUMPY: dict[torch.dtype, type[np.integer]] = {torch.int32: np.int32, torch.int64: np.int64}

Columns = Mapping[str, np.ndarray]


class StaticBuffers:
    """The buffers of one runner, at fixed addresses in one block: a load is one copy.

    Args:
        max_tokens, max_reqs: the largest padded shape.
        device: where they live.
        attention_pad_len: what `seq_lens` holds for padding rows.
        specs: which buffers.

    Attributes:
        tensors: by name, at full length, device.
    """

    def __init__(
        self,
        max_tokens: int,
        max_reqs: int,
        device: torch.device,
        attention_pad_len: int,
        *,
        specs: Sequence[BufferSpec] = TOKEN_BUFFERS,
    ) -> None:
        self.max_tokens, self.max_reqs = max_tokens, max_reqs
        self._specs = tuple(specs)
        self._attention_pad_len = attention_pad_len
        self._places: dict[str, slice] = {}
        end = 0
        for spec in self._specs:
            size = self._length(spec.axis, max_tokens, max_reqs) * spec.dtype.itemsize
            self._places[spec.name] = slice(end, end + size)
            end += aligned(size)
        self._staging = StagingBlock(end, device)
        self.tensors = {s.name: self._staging.block[self._places[s.name]].view(s.dtype) for s in self._specs}
        self._targets = [
            [(spec, host[self._places[spec.name]].view(_NUMPY[spec.dtype])) for spec in self._specs]
            for host in self._staging.host_views
        ]

    def view(self, name: str, num_tokens: int, num_reqs: int) -> torch.Tensor:
        """The part of a buffer that a padded shape uses."""
        return self.tensors[name][: self._length(_SPEC[name].axis, num_tokens, num_reqs)]

    def load(self, columns: Columns, num_real_tokens: int, num_tokens: int, num_reqs: int) -> None:
        """Fill every buffer up to the padded shape (num_tokens, num_reqs). Sync: none.

        Args:
            columns: the real values, by buffer name; a buffer without an entry is all padding.
        """
        for spec, target in self._targets[self._staging.begin()]:
            values = columns.get(spec.name, _NOTHING)
            count, length = len(values), self._length(spec.axis, num_tokens, num_reqs)
            target[:count] = values
            if count < length:
                target[count:length] = self._pad(spec, num_real_tokens)
        self._staging.send()

    def poison_padding(self, num_real_tokens: int, num_tokens: int) -> None:
        """Give padding tokens other values that are as safe: a result that follows them reads padding. Sync: none."""
        for name in _VARIED_PADDING:
            if name in self.tensors:
                self.tensors[name][num_real_tokens:num_tokens] = 1

    def poison(self, value: int) -> None:
        """Overwrite everything: what a load does not write shows."""
        for tensor in self.tensors.values():
            tensor.fill_(value)

    def _pad(self, spec: BufferSpec, num_real_tokens: int) -> int:
        if spec.pad is Pad.REAL_TOKEN_COUNT:
            return num_real_tokens
        if spec.pad is Pad.ATTENTION_PAD_LENGTH:
            return self._attention_pad_len
        assert isinstance(spec.pad, int)
        return spec.pad

    def _length(self, axis: Axis, num_tokens: int, num_reqs: int) -> int:
        if axis is Axis.TOKEN:
            return num_tokens
        return num_reqs if axis is Axis.REQUEST else num_reqs + 1


_VARIED_PADDING = ("input_ids", "positions")
_SPEC = {spec.name: spec for spec in (*TOKEN_BUFFERS, *VERIFY_BUFFERS, *HOST_BUFFERS)}
_NOTHING = np.zeros(0, np.int64)


def token_columns(batch: ScheduledBatch) -> Columns:
    """The real values of `TOKEN_BUFFERS`, as the host batch has them."""
    cached = np.asarray(batch.cached_lens, np.int64)
    queries = np.asarray(batch.query_lens, np.int64)
    rows = np.asarray(batch.rows, np.int32)
    ends = np.cumsum(queries)
    is_one_each = batch.num_tokens == batch.num_reqs
    # Position of token t of request i: cached_len[i] + (t - start[i]).
    positions = cached if is_one_each else np.arange(batch.num_tokens) + np.repeat(cached - ends + queries, queries)
    return {
        # An empty tuple says that every token is its row's last one.
        "input_ids": np.asarray(batch.input_ids or (-1,) * batch.num_tokens, np.int32),
        "positions": positions,
        "token_rows": rows if is_one_each else np.repeat(rows, queries),
        "request_rows": rows,
        "seq_lens": cached + queries,
        "query_start_loc": np.concatenate(([0], ends)),
        "logits_indices": ends - 1,
    }
