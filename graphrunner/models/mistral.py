"""Mistral: Llama's block; a checkpoint with `sliding_window` attends to that many last tokens."""

from graphrunner.layers.block import BlockBuilder
from graphrunner.models.causal_lm import CausalLM, DecoderLayer
from graphrunner.models.llama import LlamaDecoderLayer


class MistralForCausalLM(CausalLM):
    """MistralForCausalLM of Hugging Face checkpoints.

    The window is `config.sliding_window` on the layers that `config.layer_types` marks as sliding: all or none.

    Source: Jiang et al., Mistral 7B, 2023.
    """

    def build_layer(self, block: BlockBuilder) -> DecoderLayer:
        return LlamaDecoderLayer(block)
