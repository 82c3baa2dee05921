"""Llama 1 to 3, SmolLM2, and everything else that keeps their block."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.layers.block import BlockBuilder
from graphrunner.layers.loading import WeightSlot, prefixed
from graphrunner.models.causal_lm import CausalLM, DecoderLayer


class LlamaDecoderLayer(DecoderLayer):
    """Norm before each branch, five fused ops. Biases, q/k norms, windows and ropeless layers come from the config."""

    def __init__(self, block: BlockBuilder) -> None:
        super().__init__()
        self.qkv_proj = block.qkv_proj(norm="input_layernorm")
        self.attention = block.attention()
        self.o_proj = block.o_proj()
        self.gate_up_proj = block.gate_up_proj(norm="post_attention_layernorm")
        self.down_proj = block.down_proj()

    def forward(self, hidden: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        qkv = self.qkv_proj(hidden)
        attn = self.attention(qkv, batch)
        if rows is not None:
            attn, hidden = attn[rows], hidden[rows]
        hidden = self.o_proj(attn, hidden)
        act = self.gate_up_proj(hidden)
        return self.down_proj(act, hidden)

    def weight_slots(self) -> Iterator[WeightSlot]:
        return prefixed("", self.qkv_proj, self.attention, self.o_proj, self.gate_up_proj, self.down_proj)


class LlamaForCausalLM(CausalLM):
    """LlamaForCausalLM of Hugging Face checkpoints.

    Source: Touvron et al., Llama 2, 2023; Grattafiori et al., The Llama 3 Herd of Models, 2024.
    """

    def build_layer(self, block: BlockBuilder) -> DecoderLayer:
        return LlamaDecoderLayer(block)
