"""Checkpoints of drafts: their config, their tensors under one set of names, and what the tensors say about the layout.

Public layouts that are read:

    EAGLE-3      fc, midlayer.* (or layers.0.*) with hidden_norm, norm, lm_head, d2t
    EAGLE-1      fc, layers.0.*, the target's head
    DeepSeek     model.layers.N.{enorm,hnorm,eh_proj,shared_head.*} and a block, one N a head
    MiMo         model.mtp_layers.N.{token_layernorm,hidden_layernorm,input_proj,final_layernorm} and a block
    Qwen         mtp.{pre_fc_norm_embedding,pre_fc_norm_hidden,fc,norm} and mtp.layers.N.*

A matrix may be int8 with one float scale a row, `NAME.weight_scale` beside `NAME.weight`, as the shipped drafts are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphrunner.config.hf_model_config import model_config_from_hf
from graphrunner.config.model_config import ModelConfig
from graphrunner.core.errors import ModelLoadError
from graphrunner.weights.safetensors_reader import SafetensorsEntry, iterate_entries, read_entries
from graphrunner.weights.source import LoadFormat, resolve_source

_SCALE = ".weight_scale"
_UNUSED = re.compile(r"(^|\.)(t2d|rotary_emb\.inv_freq)$")


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft found on disk; nothing of it is read yet but headers.

    Attributes:
        name: as the user said it.
        config: of its decoder layers.
        raw: config.json.
        shapes: of every tensor, by the names that models use; scales of packed matrices are left out.
    """

    name: str
    config: ModelConfig
    raw: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]
    _entries: tuple[SafetensorsEntry, ...]
    _rename: Callable[[str], str]

    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every one, packed matrices widened to float32. Raises ModelLoadError."""
        scales: dict[str, Tensor] = {}
        waiting: dict[str, Tensor] = {}
        packed = {_base(entry.name) for entry in self._entries if entry.name.endswith(_SCALE)}
        for entry, tensor in iterate_entries([e for e in self._entries if not _UNUSED.search(e.name)]):
            base = _base(entry.name)
            if base not in packed:
                yield self._rename(entry.name), tensor.to(device)
                continue
            (scales if entry.name.endswith(_SCALE) else waiting)[base] = tensor.to(device)
            if base in scales and base in waiting:
                yield self._rename(base), waiting.pop(base).float() * scales.pop(base).float()
        if waiting or scales:
            raise ModelLoadError(f"{self.name}: tensor {next(iter({**waiting, **scales}))} lacks its other half")

    def number(self, name: str, default: int) -> int:
        """A whole number of config.json, at least 1. Raises ModelLoadError."""
        value = self.raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelLoadError(f"{self.name}: {name}={value!r} must be a whole number above 0")
        return value


def open_draft(name: str, rename: Callable[[str], str], *, num_layers: int | None = None) -> DraftCheckpoint:
    """Find a draft: a folder with config.json and safetensors, or a hub id.

    Args:
        rename: a file's tensor name to the name that the model uses.
        num_layers: of the draft; None takes the config's.

    Raises:
        ModelLoadError: one line that names the path and what is wrong with it.
    """
    source = resolve_source(name, LoadFormat.AUTO)
    folder = source.path
    if not folder.is_dir() or not source.weight_files or source.weight_files[0].suffix != ".safetensors":
        raise ModelLoadError(f"{name}: a draft is a folder with config.json and *.safetensors")
    raw = _read_config(folder / "config.json")
    entries = tuple(read_entries(source.weight_files))
    shapes = {
        rename(entry.name): entry.shape
        for entry in entries
        if not entry.name.endswith(_SCALE) and not _UNUSED.search(entry.name)
    }
    return DraftCheckpoint(name, _layer_config(raw, shapes, num_layers), raw, shapes, entries, rename)


def _base(name: str) -> str:
    """The matrix that a scale belongs to; any other name as it is."""
    return f"{name.removesuffix(_SCALE)}.weight" if name.endswith(_SCALE) else name


def _read_config(path: Path) -> dict[str, object]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, holds {type(raw).__name__}")
    # Some layouts wrap the decoder's numbers.
    inner = raw.get("transformer_layer_config")
    return {**raw, **inner} if isinstance(inner, dict) else raw


def _layer_config(
    raw: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], num_layers: int | None
) -> ModelConfig:
    """The numbers of the draft's blocks. What blocks of different families differ in is told by their tensors."""
    has_qk_norm = any(name.endswith("self_attn.q_norm.weight") for name in shapes)
    has_bias = any(name.endswith("self_attn.q_proj.bias") for name in shapes)
    architecture = "Qwen3ForCausalLM" if has_qk_norm else "Qwen2ForCausalLM" if has_bias else "LlamaForCausalLM"
    fields = {**raw, "architectures": [architecture]}
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
    fields.pop("layer_types", None)  # of the target, whose count is another
    return model_config_from_hf(fields)
