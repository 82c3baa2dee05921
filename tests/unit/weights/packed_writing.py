"""Writes a tiny Llama in each public layout of packed checkpoints, with arithmetic of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

HIDDEN, INTERMEDIATE, HEAD_DIM, VOCAB = 64, 160, 32, 48
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_E4M3 = torch.float8_e4m3fn
# What a writer makes of one matrix: its tensors by the last part of their names, and the numbers they stand for.
Written = tuple[dict[str, Tensor], Tensor]


def _to_fp8(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    data = (weight / scale).clamp(-448, 448).to(_E4M3)
    return data, data.float() * scale


def fp8_block(weight: Tensor, scale_name: str = "weight_scale_inv", size: int = 128) -> Written:
    rows, columns = weight.shape
    padded = pad(weight, (0, -columns % size, 0, -rows % size))
    blocks = padded.unfold(0, size, size).unfold(1, size, size)
    scale = blocks.abs().amax((2, 3)) / 448
    wide = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[:rows, :columns]
    data, restored = _to_fp8(weight, wide)
    return {"weight": data, scale_name: scale}, restored


def fp8_tensor(weight: Tensor, shape: tuple[int, ...] = ()) -> Written:
    scale = weight.abs().max() / 448
    data, restored = _to_fp8(weight, scale)
    return {"weight": data, "weight_scale": scale.reshape(shape), "input_scale": torch.tensor(0.5)}, restored


def fp8_channel(weight: Tensor) -> Written:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    data, restored = _to_fp8(weight, scale.float())
    return {"weight": data, "weight_scale": scale}, restored


def int8_channel(weight: Tensor) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 127
    data = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return {"weight": data, "weight_scale": scale}, data.float() * scale


def _words(numbers: Tensor) -> Tensor:
    """Eight numbers of 0 to 15 a word, along the last axis, padded with zeros."""
    numbers = pad(numbers, (0, -numbers.shape[-1] % 8)).long().view(*numbers.shape[:-1], -1, 8)
    words = (numbers << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def int4_group(weight: Tensor, is_symmetric: bool = True, size: int = 32) -> Written:
    groups = weight.view(weight.shape[0], -1, size)
    if is_symmetric:
        scale = groups.abs().amax(-1) / 7.5
        zero = torch.zeros_like(scale)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = (high - low) / 15
        zero = (-8 - low / scale).round().clamp(-8, 7)
    scale = scale.bfloat16().float()
    numbers = (groups / scale.unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(-8, 7)
    restored = ((numbers - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).view_as(weight)
    tensors = {
        "weight_packed": _words(numbers.view_as(weight) + 8),
        "weight_scale": scale.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = _words((zero + 8).t()).t().contiguous()
    return tensors, restored


def _asymmetric(weight: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers [N, K], zeros and scales [N, groups], and what they mean."""
    groups = weight.view(weight.shape[0], -1, size)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(1, 15)
    numbers = (groups / scale.unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, 15)
    meaning = ((numbers - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).view_as(weight)
    return numbers.view_as(weight), zero, scale, meaning


def gptq(weight: Tensor, size: int = 32) -> Written:
    """Words down the inputs, zeros along the outputs and less one."""
    numbers, zero, scale, meaning = _asymmetric(weight, size)
    tensors = {
        "qweight": _words(numbers).t(),
        "qzeros": _words(zero.t() - 1),
        "scales": scale.t().half(),
        "g_idx": (torch.arange(weight.shape[1]) // size).int(),
    }
    return tensors, meaning


def awq(weight: Tensor, size: int = 32) -> Written:
    """Words along the outputs, whose eight columns are taken even ones first."""
    numbers, zero, scale, meaning = _asymmetric(weight, size)

    def pack(matrix: Tensor) -> Tensor:
        return _words(matrix.view(matrix.shape[0], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1))

    return {
        "qweight": pack(numbers.t().contiguous()),
        "qzeros": pack(zero.t().contiguous()),
        "scales": scale.t().half(),
    }, meaning


def _compressed(fmt: str, weights: dict[str, object]) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*layers\\.1\\.mlp\\.down_proj"],
    }


@dataclass(frozen=True)
class Layout:
    """One public layout: the section of config.json and what it makes of a matrix."""

    section: dict[str, object]
    write: Callable[[Tensor], Written]


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
LAYOUTS = {
    "fp8-block": Layout(
        {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj"],
        },
        fp8_block,
    ),
    "fp8-tensor": Layout(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, fp8_tensor
    ),
    "fbgemm": Layout({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, fp8_channel),
    "ct-fp8-tensor": Layout(
        _compressed("float-quantized", _FP8 | {"strategy": "tensor"}), lambda weight: fp8_tensor(weight, (1,))
    ),
    "ct-fp8-channel": Layout(_compressed("float-quantized", _FP8 | {"strategy": "channel"}), fp8_channel),
    "ct-fp8-block": Layout(
        _compressed("float-quantized", _FP8 | {"strategy": "block", "block_structure": [128, 128]}),
        lambda weight: fp8_block(weight, "weight_scale"),
    ),
    "gptq": Layout({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}, gptq),
    "awq": Layout({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq),
    "ct-int8": Layout(
        _compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}), int8_channel
    ),
    "ct-int4": Layout(_compressed("pack-quantized", _INT4 | {"symmetric": True}), int4_group),
    "ct-int4-zero": Layout(
        _compressed("pack-quantized", _INT4 | {"symmetric": False}), lambda weight: int4_group(weight, False)
    ),
}  # fmt: skip


def plain_weights(seed: int = 0) -> dict[str, Tensor]:
    """The model before it is packed."""
    generator = torch.Generator().manual_seed(seed)
    q_len, kv_len = 4 * HEAD_DIM, 2 * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)
    }  # fmt: skip
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {
            f"{layer}input_layernorm.weight": (HIDDEN,), f"{layer}post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}self_attn.q_proj.weight": (q_len, HIDDEN), f"{layer}self_attn.k_proj.weight": (kv_len, HIDDEN),
            f"{layer}self_attn.v_proj.weight": (kv_len, HIDDEN), f"{layer}self_attn.o_proj.weight": (HIDDEN, q_len),
            f"{layer}mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{layer}mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{layer}mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }  # fmt: skip
    return {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write_packed(folder: Path, layout: Layout, num_files: int = 2) -> dict[str, Tensor]:
    """Write the folder and return what its numbers mean. Scales lie in another file than their weights.

    What the section says to leave alone is left alone.
    """
    from graphrunner.config.checkpoint_quantization import checkpoint_quantization

    packing = checkpoint_quantization({"quantization_config": layout.section})
    assert packing is not None
    stored: dict[str, Tensor] = {}
    meaning: dict[str, Tensor] = {}
    for name, weight in plain_weights().items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or packing.is_ignored(module):
            stored[name] = meaning[name] = weight
            continue
        tensors, meaning[name] = layout.write(weight)
        stored |= {f"{module}.{part}": tensor for part, tensor in tensors.items()}
    write_folder(folder, layout.section, stored, num_files)
    return meaning


def write_folder(folder: Path, section: dict[str, object] | None, stored: dict[str, Tensor], num_files: int) -> None:
    """config.json and the weights, spread over files name by name."""
    extra = {} if section is None else {"quantization_config": section}
    (folder / "config.json").write_text(json.dumps(CONFIG | extra))
    files = {name: f"model-{index % num_files}.safetensors" for index, name in enumerate(sorted(stored))}
    for file in set(files.values()):
        chosen = {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in stored.items()
            if files[name] == file
        }
        save_file(chosen, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
