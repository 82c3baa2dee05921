"""Qwen2 and Qwen2.5: Llama's block with a bias on q, k and v, and optionally a window on the upper layers."""

from graphrunner.layers.block import BlockBuilder
from graphrunner.models.causal_lm import CausalLM, DecoderLayer
from graphrunner.models.llama import LlamaDecoderLayer


class Qwen2ForCausalLM(CausalLM):
    """Qwen2ForCausalLM of Hugging Face checkpoints; `config.attention_bias` is always set for it.

    Source: Yang et al., Qwen2 Technical Report, 2024.
    """

    def build_layer(self, block: BlockBuilder) -> DecoderLayer:
        return LlamaDecoderLayer(block)
