"""The static buffers: a table of what recorded forwards read, and the one loader that fills it.

docs/padding.md is this table in words; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from graphrunner.core.scheduled_batch import ScheduledBatch


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


LOADED_BUFFERS: tuple[BufferSpec, ...] = (
    BufferSpec("input_ids", torch.int32, Axis.TOKEN, 0, "a valid id; the token's output is cut off"),
    BufferSpec("positions", torch.int64, Axis.TOKEN, 0, "a valid rope index; the token's output is cut off"),
    BufferSpec("token_rows", torch.int32, Axis.TOKEN, 0, "the dummy row: its KV goes to the dummy page"),
    BufferSpec("request_rows", torch.int32, Axis.REQUEST, 0, "the dummy row: every column is the dummy page"),
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


class StaticBuffers:
    """The buffers of one runner, at fixed addresses.

    Args:
        max_tokens, max_reqs: the largest padded shape.
        device: where they live.
        attention_pad_len: what `seq_lens` holds for padding rows.
    """

    def __init__(self, max_tokens: int, max_reqs: int, device: torch.device, attention_pad_len: int) -> None:
        lengths = {Axis.TOKEN: max_tokens, Axis.REQUEST: max_reqs, Axis.REQUEST_PLUS_ONE: max_reqs + 1}
        self.tensors = {
            spec.name: torch.zeros(lengths[spec.axis], dtype=spec.dtype, device=device) for spec in LOADED_BUFFERS
        }
        self._attention_pad_len = attention_pad_len
        self._device = device

    def view(self, name: str, num_tokens: int, num_reqs: int) -> torch.Tensor:
        """The part of a buffer that a padded shape uses."""
        return self.tensors[name][: _length(_SPEC[name].axis, num_tokens, num_reqs)]

    def load(self, batch: ScheduledBatch, num_tokens: int, num_reqs: int) -> None:
        """Fill every buffer for `batch`, padded to (num_tokens, num_reqs). Sync: none on the device."""
        real = host_columns(batch)
        for spec in LOADED_BUFFERS:
            values = real[spec.name]
            padded = np.full(_length(spec.axis, num_tokens, num_reqs), self._pad(spec, batch), dtype=values.dtype)
            padded[: len(values)] = values
            self.view(spec.name, num_tokens, num_reqs).copy_(torch.from_numpy(padded))

    def poison(self, value: int) -> None:
        """Overwrite everything: what a load does not write shows."""
        for tensor in self.tensors.values():
            tensor.fill_(value)

    def _pad(self, spec: BufferSpec, batch: ScheduledBatch) -> int:
        if spec.pad is Pad.REAL_TOKEN_COUNT:
            return batch.num_tokens
        if spec.pad is Pad.ATTENTION_PAD_LENGTH:
            return self._attention_pad_len
        assert isinstance(spec.pad, int)
        return spec.pad


_SPEC = {spec.name: spec for spec in LOADED_BUFFERS}
_NUMPY = {torch.int32: np.int32, torch.int64: np.int64}


def host_columns(batch: ScheduledBatch) -> dict[str, np.ndarray]:
    """The real values of every loaded buffer, as the host batch has them."""
    cached = np.asarray(batch.cached_lens, np.int64)
    queries = np.asarray(batch.query_lens, np.int64)
    ends = np.cumsum(queries)
    starts = ends - queries
    # Position of token t of request i: cached_len[i] + (t - start[i]).
    positions = np.arange(batch.num_tokens) + np.repeat(cached - starts, queries)
    input_ids = batch.input_ids or (-1,) * batch.num_tokens
    columns = {
        "input_ids": np.asarray(input_ids),
        "positions": positions,
        "token_rows": np.repeat(np.asarray(batch.rows), queries),
        "request_rows": np.asarray(batch.rows),
        "seq_lens": cached + queries,
        "query_start_loc": np.concatenate(([0], ends)),
        "logits_indices": ends - 1,
    }
    return {name: values.astype(_NUMPY[_SPEC[name].dtype]) for name, values in columns.items()}


def _length(axis: Axis, num_tokens: int, num_reqs: int) -> int:
    return {Axis.TOKEN: num_tokens, Axis.REQUEST: num_reqs, Axis.REQUEST_PLUS_ONE: num_reqs + 1}[axis]
