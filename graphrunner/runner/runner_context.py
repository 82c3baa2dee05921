"""What every runner is handed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from graphrunner.attention.backend import AttentionBackend
from graphrunner.core.draft_tree import DraftTree, TreeGrowth
from graphrunner.core.forward_batch import KVLayer
from graphrunner.core.outputs import ModelOutput
from graphrunner.runner.base_runner import Forward
from graphrunner.runner.request_table import RequestTable

Tail = Callable[[torch.Tensor], ModelOutput]
"""Hidden states of the rows that need logits -> their logits; run outside the graph on the real rows only."""


@dataclass(frozen=True, slots=True)
class RunnerContext:
    """Shared by all runners of an engine.

    Attributes:
        forward: model, logits and, by variant, sampling.
        tail: logits of hidden rows.
        table: the request table.
        kv_layers: the KV pages.
        attention: the backend that reads them.
        device: where everything lives.
        page_size: tokens a page.
        max_seq_len: context limit, and the draft tokens past it, tokens.
        draft_tree: how the drafts of a verify step branch; None for one guess after the other.
        needs_hidden_states: somebody reads the hidden states of every step: an eager step must return them too.
    """

    forward: Forward
    tail: Tail
    table: RequestTable
    kv_layers: tuple[KVLayer, ...]
    attention: AttentionBackend
    device: torch.device
    page_size: int
    max_seq_len: int
    needs_hidden_states: bool = False
    draft_tree: DraftTree | TreeGrowth | None = None
