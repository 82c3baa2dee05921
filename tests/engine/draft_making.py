"""Drafts on disk for tiny targets, in the layouts of public checkpoints.

A target whose blocks add little to its residual stream picks its next token by the last one alone, and a draft that
does the same is nearly always right; random weights are nearly always wrong.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HIDDEN, INTERMEDIATE, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 48, 96, 96, 4, 2, 16
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
}


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape) / shape[-1] ** 0.5


def _block(prefix: str, num_inputs: int = HIDDEN, strength: float = 1.0) -> dict[str, Tensor]:
    """A decoder layer's tensors but for its input norm; `strength` scales what it adds to the residual stream."""
    return {
        f"{prefix}self_attn.q_proj.weight": _random(HEADS * HEAD_DIM, num_inputs),
        f"{prefix}self_attn.k_proj.weight": _random(KV_HEADS * HEAD_DIM, num_inputs),
        f"{prefix}self_attn.v_proj.weight": _random(KV_HEADS * HEAD_DIM, num_inputs),
        f"{prefix}self_attn.o_proj.weight": _random(HIDDEN, HEADS * HEAD_DIM) * strength,
        f"{prefix}post_attention_layernorm.weight": 1 + 0.1 * torch.randn(HIDDEN),
        f"{prefix}mlp.gate_proj.weight": _random(INTERMEDIATE, HIDDEN),
        f"{prefix}mlp.up_proj.weight": _random(INTERMEDIATE, HIDDEN),
        f"{prefix}mlp.down_proj.weight": _random(HIDDEN, INTERMEDIATE) * strength,
    }


def _first_half(is_right: bool) -> Tensor:
    """A matrix [C, 2C] that joins two inputs: the first one as it is, or anything."""
    return torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1) if is_right else _random(HIDDEN, 2 * HIDDEN)


def _ones(*names: str) -> dict[str, Tensor]:
    return {name: torch.ones(HIDDEN) for name in names}


def _save(folder: Path, architecture: str, tensors: dict[str, Tensor], **more: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": [architecture]} | more))
    return folder


def eagle3(folder: Path, *, prefix: str = "midlayer.", num_drafted: int = 60) -> Path:
    """EAGLE-3 with a reduced vocabulary: every token that is not a multiple of some number."""
    torch.manual_seed(21)
    ids = torch.randperm(VOCAB)[:num_drafted].sort().values
    tensors = {
        **_block(prefix, 2 * HIDDEN),
        **_ones(f"{prefix}input_layernorm.weight", f"{prefix}hidden_norm.weight", "norm.weight"),
        "fc.weight": _random(HIDDEN, 2 * HIDDEN),
        "lm_head.weight": _random(num_drafted, HIDDEN),
        "d2t": ids - torch.arange(num_drafted),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
    }
    return _save(
        folder,
        "LlamaForCausalLMEagle3",
        tensors,
        draft_vocab_size=num_drafted,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]},
    )


def eagle1(folder: Path, *, is_right: bool = True) -> Path:
    """EAGLE-1: the target's own head, no norm before the layer."""
    torch.manual_seed(22)
    tensors = {**_block("layers.0.", strength=0.0 if is_right else 1.0), "fc.weight": _first_half(is_right)}
    return _save(folder, "LlamaForCausalLMEagle", tensors)


def eagle1_second_best(folder: Path, target_head: Tensor) -> Path:
    """An EAGLE-1 draft whose likeliest token is the wrong one of a pair, and its second the right one."""
    eagle1(folder)
    partner = torch.arange(VOCAB) ^ 1
    head = target_head[partner] + 0.99 * target_head
    tensors = load_file(folder / "model.safetensors") | {"lm_head.weight": head}
    return _save(folder, "LlamaForCausalLMEagle", tensors)


def mtp(folder: Path, family: str = "DeepSeek", *, num_heads: int = 2, is_right: bool = True) -> Path:
    """Multi-token heads under the names of a family."""
    torch.manual_seed(23)
    names = {
        "DeepSeek": ("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm", 2),
        "MiMo": ("model.mtp_layers.{}.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", 0),
    }
    tensors: dict[str, Tensor] = {}
    for index in range(num_heads):
        if family == "Qwen":
            block, outer = f"mtp.layers.{index}.", "mtp."
            parts = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        else:
            form, *parts_, first = names[family]
            block = outer = form.format(first + index)
            parts = tuple(parts_)
        enorm, hnorm, joint, final = (f"{outer}{part}.weight" for part in parts)
        matrix = _first_half(is_right)
        tensors |= _block(block, strength=0.0 if is_right else 1.0)
        tensors |= _ones(f"{block}input_layernorm.weight", enorm, hnorm, final)
        tensors[joint] = matrix.roll(HIDDEN, 1) if family == "MiMo" else matrix
    if family == "Qwen":  # its norms are stored less one
        norms = {name: tensor - 1 for name, tensor in tensors.items() if "norm" in name}
        tensors |= norms
    return _save(folder, f"{family}MTPModel", tensors)


def frozen_kv(folder: Path, *, is_right: bool = True) -> Path:
    """A head that reads the KV of the target's first layer."""
    torch.manual_seed(24)
    block = _block("", strength=0.0 if is_right else 1.0)
    del block["self_attn.k_proj.weight"], block["self_attn.v_proj.weight"]
    norms = _ones("enorm.weight", "hnorm.weight", "input_layernorm.weight", "norm.weight")
    tensors = {**block, **norms, "eh_proj.weight": _first_half(is_right)}
    return _save(folder, "FrozenKVDraftModel", tensors, target_kv_layer=0)
