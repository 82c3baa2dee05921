"""Gemma 2: a norm before and after each branch, soft caps, every other layer with a window."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.layers.block import BlockBuilder
from graphrunner.layers.loading import WeightSlot, prefixed
from graphrunner.models.causal_lm import CausalLM, DecoderLayer


class GemmaDecoderLayer(DecoderLayer):
    """Each branch is normalised on its way in and on its way out."""

    def __init__(self, block: BlockBuilder) -> None:
        super().__init__()
        self.qkv_proj = block.qkv_proj(norm="input_layernorm")
        self.attention = block.attention()
        self.o_proj = block.plain_o_proj()
        self.attention_norm = block.norm_residual("post_attention_layernorm")
        self.gate_up_proj = block.gate_up_proj(norm="pre_feedforward_layernorm")
        self.down_proj = block.plain_down_proj()
        self.feedforward_norm = block.norm_residual("post_feedforward_layernorm")

    def forward(self, hidden: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        qkv = self.qkv_proj(hidden)
        attn = self.attention(qkv, batch)
        if rows is not None:
            attn, hidden = attn[rows], hidden[rows]
        hidden = self.attention_norm(self.o_proj(attn), hidden)
        act = self.gate_up_proj(hidden)
        return self.feedforward_norm(self.down_proj(act), hidden)

    def weight_slots(self) -> Iterator[WeightSlot]:
        attention = (self.qkv_proj, self.attention, self.o_proj, self.attention_norm)
        return prefixed("", *attention, self.gate_up_proj, self.down_proj, self.feedforward_norm)


class Gemma2ForCausalLM(CausalLM):
    """Gemma2ForCausalLM of Hugging Face checkpoints.

    Embeddings are scaled, norm weights are kept minus one, scores and logits are soft-capped, scores are divided by
    the root of `query_pre_attn_scalar`: all numbers of the config but the norms' offset.

    Source: Gemma Team, Gemma 2, 2024.
    """

    norm_offset = 1.0

    def build_layer(self, block: BlockBuilder) -> DecoderLayer:
        return GemmaDecoderLayer(block)
