"""The device view of one step: what a model's forward receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphrunner.core.shape_key import ForwardMode

if TYPE_CHECKING:
    import torch

    from graphrunner.attention.backend import AttentionBackend


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The KV pages of one layer: [num_pages, page_size, num_kv_heads, head_dim] each, device."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tensors of one step, padded to a `ShapeKey` (T = padded tokens, R = padded requests).

    Attributes:
        mode: DECODE and VERIFY are uniform: every request, padding included, has exactly T / R query tokens.
        input_ids: int32 [T], device.
        positions: int64 [T], device; index of the token in its sequence.
        slot_mapping: int64 [T], device; page * page_size + offset where the token's KV is written.
        request_rows: int32 [R], device; row of each request in `page_table`; 0 is the dummy row.
        seq_lens: int32 [R], device; tokens, this step included; padding rows hold the pad length.
        query_start_loc: int32 [R + 1], device; padding requests of a non-uniform batch have no queries.
        page_table: int32 [num_rows, max_pages], device; the whole table; row 0 is all dummy page.
        logits_indices: int64 [R], device; the token of each request whose logits are wanted.
        kv_layers: the KV pages, one entry a layer.
        attention: the backend that reads them.
        attention_metadata: what that backend prepared for this step, opaque to everyone else.
        num_tokens, num_reqs: T and R.
        max_query_len: upper bound of the query lengths (static inside a graph).
        max_seq_len: upper bound of seq_lens (static inside a graph: the context limit).
        draft_tokens: int32 [R, T / R - 1], device, VERIFY only; drafts, -1 where a request has fewer.
        tree_mask: uint8 [R, T / R, T / R], device, of a step whose tokens branch: [r, i, j] != 0 lets token i see token
            j of the step. `positions` are then where tokens would stand, not where their KV is. None is causal.
        tree_parents: int64 [R, T / R - 1], device, of a VERIFY step whose drafts branch: the token that each follows.
    """

    mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    request_rows: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    page_table: torch.Tensor
    logits_indices: torch.Tensor
    kv_layers: tuple[KVLayer, ...]
    attention: AttentionBackend
    attention_metadata: object
    num_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    draft_tokens: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    tree_parents: torch.Tensor | None = None
