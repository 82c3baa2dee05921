"""SmolLM3: Llama's block, every fourth layer without rotary embedding."""

from graphrunner.layers.block import BlockBuilder
from graphrunner.models.causal_lm import CausalLM, DecoderLayer
from graphrunner.models.llama import LlamaDecoderLayer


class SmolLM3ForCausalLM(CausalLM):
    """SmolLM3ForCausalLM of Hugging Face checkpoints; `config.no_rope_layers` names the layers without rotation.

    Source: Bakouch et al., SmolLM3, 2025; Yang et al., RoPE to NoPE and Back Again, 2025.
    """

    def build_layer(self, block: BlockBuilder) -> DecoderLayer:
        return LlamaDecoderLayer(block)
