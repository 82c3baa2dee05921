"""Qwen3, dense: Llama's block with a norm on every query and key head before the rotation."""

from graphrunner.layers.block import BlockBuilder
from graphrunner.models.causal_lm import CausalLM, DecoderLayer
from graphrunner.models.llama import LlamaDecoderLayer


class Qwen3ForCausalLM(CausalLM):
    """Qwen3ForCausalLM of Hugging Face checkpoints; `config.qk_norm` is always set for it.

    Source: Yang et al., Qwen3 Technical Report, 2025.
    """

    def build_layer(self, block: BlockBuilder) -> DecoderLayer:
        return LlamaDecoderLayer(block)
