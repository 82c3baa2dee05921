"""llama.cpp's tensor names and layouts -> those of Hugging Face checkpoints.

Three things differ beside the names. Architectures whose rope rotates neighbouring pairs store the rows of q and k
with the two rope halves of a head interleaved; Gemma's norms store w + 1; frequency tables are tensors.
Source: gguf-py tensor_mapping.py and convert_hf_to_gguf.py of llama.cpp (names and conventions only).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from graphrunner.core.errors import ModelLoadError

#: GGUF general.architecture -> Hugging Face class name.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_INTERLEAVED_ROPE = frozenset({"llama", "mistral", "smollm3"})
_GEMMA = frozenset({"gemma2", "gemma3"})
#: Tensors that hold no weights: rope frequency tables, read by gguf_config.
_NOT_WEIGHTS = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short"})

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_BLOCK = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_TOP_NAME = re.compile(r"([a-z_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class HFTensor:
    """Where a GGUF tensor goes: its Hugging Face name and what its values need.

    `num_interleaved_heads`: rows are heads of interleaved rope halves, this many heads; 0: rows are in order.
    `is_norm_plus_one`: one is to be subtracted.
    """

    name: str
    num_interleaved_heads: int = 0
    is_norm_plus_one: bool = False

    def restore(self, values: Tensor) -> Tensor:
        """Undo the layout: float [rows, ...] in, the same shape out (a new tensor, or `values` changed in place)."""
        if self.is_norm_plus_one:
            return values.sub_(1.0)
        if not self.num_interleaved_heads:
            return values
        half = values.shape[0] // self.num_interleaved_heads // 2
        pairs = values.view(self.num_interleaved_heads, half, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)


def to_hf(gguf_name: str, architecture: str, num_q_heads: int, num_kv_heads: int) -> HFTensor | None:
    """The Hugging Face tensor of a GGUF one; None if it holds no weights.

    Raises:
        ModelLoadError: a name this architecture does not have.
    """
    is_gemma = architecture in _GEMMA
    block = _BLOCK_NAME.fullmatch(gguf_name)
    if block:
        layer, part, suffix = block.groups()
        name = (_GEMMA_BLOCK if is_gemma else _BLOCK).get(part)
        if name:
            heads = {"attn_q": num_q_heads, "attn_k": num_kv_heads}.get(part, 0)
            return HFTensor(
                f"model.layers.{layer}.{name}.{suffix}",
                num_interleaved_heads=heads if architecture in _INTERLEAVED_ROPE else 0,
                is_norm_plus_one=is_gemma and part.endswith("norm"),
            )
        if part in _NOT_WEIGHTS:
            return None
    top = _TOP_NAME.fullmatch(gguf_name)
    if top and top[1] in _NOT_WEIGHTS:
        return None
    if top and top[1] in _TOP_LEVEL:
        return HFTensor(f"{_TOP_LEVEL[top[1]]}.{top[2]}", is_norm_plus_one=is_gemma and top[1] == "output_norm")
    raise ModelLoadError(f"GGUF tensor {gguf_name} is not known for architecture {architecture}")
