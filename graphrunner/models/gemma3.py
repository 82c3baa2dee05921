"""Gemma 3, text: Gemma 2's block with q/k norms for soft caps, five windowed layers to a full one, two rope bases."""

from graphrunner.layers.block import BlockBuilder
from graphrunner.models.causal_lm import CausalLM, DecoderLayer
from graphrunner.models.gemma2 import GemmaDecoderLayer


class Gemma3ForCausalLM(CausalLM):
    """Gemma3ForCausalLM, and the text half of Gemma3ForConditionalGeneration, of Hugging Face checkpoints.

    Source: Gemma Team, Gemma 3 Technical Report, 2025.
    """

    norm_offset = 1.0

    def build_layer(self, block: BlockBuilder) -> DecoderLayer:
        return GemmaDecoderLayer(block)
