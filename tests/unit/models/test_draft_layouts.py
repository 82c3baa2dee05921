"""Tensors of published drafts, by name and shape, and what is said about those that cannot be used."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import draft_making
import pytest
import torch
from safetensors.torch import load_file, save_file

from graphrunner.config.hf_model_config import model_config_from_hf
from graphrunner.core.errors import ModelLoadError
from graphrunner.models import mtp
from graphrunner.models.causal_lm import CausalLM
from graphrunner.models.draft_checkpoint import DraftCheckpoint
from graphrunner.models.eagle import EagleDraft, eagle_name, load_eagle
from graphrunner.models.frozen_kv import load_frozen_kv
from graphrunner.models.mtp import MIMO, MTPDraft, load_mtp
from graphrunner.models.options import ModelOptions
from graphrunner.models.registry import build_model
from graphrunner.weights.dummy import iterate_dummy

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}  # fmt: skip
MIMO_7B = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151680, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
_LLAMA_MLP = {
    "mlp.gate_proj.weight": (14336, 4096), "mlp.up_proj.weight": (14336, 4096), "mlp.down_proj.weight": (4096, 14336),
    "self_attn.o_proj.weight": (4096, 4096), "post_attention_layernorm.weight": (4096,),
}  # fmt: skip
EAGLE3_LLAMA_8B = {
    "fc.weight": (4096, 12288), "norm.weight": (4096,), "lm_head.weight": (32000, 4096), "d2t": (32000,),
    "midlayer.self_attn.q_proj.weight": (4096, 8192), "midlayer.self_attn.k_proj.weight": (1024, 8192),
    "midlayer.self_attn.v_proj.weight": (1024, 8192), "midlayer.input_layernorm.weight": (4096,),
    "midlayer.hidden_norm.weight": (4096,), **{f"midlayer.{name}": shape for name, shape in _LLAMA_MLP.items()},
}  # fmt: skip
EAGLE1_LLAMA_8B = {
    "embed_tokens.weight": (128256, 4096), "fc.weight": (4096, 8192),
    "layers.0.self_attn.q_proj.weight": (4096, 4096), "layers.0.self_attn.k_proj.weight": (1024, 4096),
    "layers.0.self_attn.v_proj.weight": (1024, 4096),
    **{f"layers.0.{name}": shape for name, shape in _LLAMA_MLP.items()},
}  # fmt: skip
MIMO_7B_MTP = {
    "token_layernorm.weight": (4096,), "hidden_layernorm.weight": (4096,), "input_proj.weight": (4096, 8192),
    "final_layernorm.weight": (4096,), "input_layernorm.weight": (4096,), "post_attention_layernorm.weight": (4096,),
    "self_attn.q_proj.weight": (4096, 4096), "self_attn.k_proj.weight": (1024, 4096),
    "self_attn.v_proj.weight": (1024, 4096), "self_attn.o_proj.weight": (4096, 4096),
    "self_attn.q_proj.bias": (4096,), "self_attn.k_proj.bias": (1024,), "self_attn.v_proj.bias": (1024,),
    "mlp.gate_proj.weight": (11008, 4096), "mlp.up_proj.weight": (11008, 4096), "mlp.down_proj.weight": (4096, 11008),
}  # fmt: skip


def _empty(config: dict[str, object]) -> CausalLM:
    """A model without weights: they take memory only when they arrive."""
    return build_model(model_config_from_hf(config), ModelOptions(num_positions=8))


def _checkpoint(config: dict[str, object], shapes: dict[str, tuple[int, ...]], **raw: object) -> DraftCheckpoint:
    one_layer = model_config_from_hf(config | {"num_hidden_layers": 1})
    return DraftCheckpoint("published", one_layer, config | raw, shapes, (), str)


@pytest.mark.parametrize("shapes", [EAGLE3_LLAMA_8B, EAGLE1_LLAMA_8B], ids=["eagle3", "eagle1"])
def test_eagle_of_llama_8b(shapes: dict[str, tuple[int, ...]]) -> None:
    renamed = {eagle_name(name): shape for name, shape in shapes.items()}
    draft = EagleDraft(_checkpoint(LLAMA_8B, renamed), _empty(LLAMA_8B))
    assert {slot.name: slot.shape for slot in draft.weight_slots() if not slot.is_optional} == renamed
    assert draft.aux_layers == ((1, 15, 28) if shapes is EAGLE3_LLAMA_8B else ())


def test_mtp_of_mimo_7b() -> None:
    ours = partial(mtp._own_name, MIMO, 0)
    renamed = {ours(f"model.mtp_layers.0.{name}"): shape for name, shape in MIMO_7B_MTP.items()}
    draft = MTPDraft(_checkpoint(MIMO_7B, renamed), MIMO, _empty(MIMO_7B), 1)
    assert {slot.name: slot.shape for slot in draft.weight_slots() if not slot.is_optional} == renamed


@pytest.fixture(scope="module")
def target() -> CausalLM:
    config = model_config_from_hf(draft_making.CONFIG | {"architectures": ["LlamaForCausalLM"]})
    model = build_model(config, ModelOptions(num_positions=64))
    model.load_weights(iterate_dummy(config, torch.float32, torch.device("cpu"), seed=2))
    return model


def test_the_target_may_lie_in_the_same_folder(target: CausalLM, tmp_path: Path) -> None:
    """DeepSeek numbers its heads on from the target's layers; the target's own tensors are passed over."""
    folder = draft_making.mtp(tmp_path / "mtp", num_heads=3)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2), "model.embed_tokens.weight": torch.zeros(3, 3)}
    tensors["model.layers.2.embed_tokens.weight"] = torch.zeros(96, 48)
    save_file(tensors, folder / "model.safetensors")
    assert load_mtp(str(folder), target, 2).num_heads == 2
    assert load_mtp(str(folder), target, 9).num_heads == 3


def _edited(folder: Path, *, drop: str = "", config: dict[str, object] | None = None, **put: torch.Tensor) -> str:
    tensors = load_file(folder / "model.safetensors") | put
    tensors.pop(drop, None)
    save_file(tensors, folder / "model.safetensors")
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | (config or {})))
    return str(folder)


def test_what_does_not_fit_is_named(target: CausalLM, tmp_path: Path) -> None:
    def eagle3(name: str) -> Path:
        return draft_making.eagle3(tmp_path / name)

    bad = [
        (_edited(eagle3("a"), drop="fc.weight"), r"fc\.weight is missing"),
        (
            _edited(eagle3("b"), drop="midlayer.mlp.up_proj.weight"),
            r"/b: tensor midlayer\.mlp\.up_proj\.weight is missing",
        ),
        (_edited(eagle3("c"), extra=torch.zeros(2)), "/c: tensor extra is not part of the architecture"),
        (_edited(eagle3("d"), config={"vocab_size": 7}), "vocab_size=7, the target has 96"),
        (_edited(eagle3("e"), config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9]}}), r"\[1, 9\]"),
        (_edited(eagle3("f"), config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2]}}), "another target"),
        (_edited(eagle3("g"), d2t=torch.full((60,), 90)), "d2t leads to token 149"),
        (str(tmp_path / "nowhere"), "no such file or folder"),
    ]
    for name, message in bad:
        with pytest.raises(ModelLoadError, match=message):
            load_eagle(name, target)
    other = str(eagle3("h"))
    with pytest.raises(ModelLoadError, match=rf"^{re.escape(other)}: tensor .* is not part of the architecture"):
        load_frozen_kv(other, target)
    with pytest.raises(ModelLoadError, match=r"no multi-token-prediction heads|no known multi-token heads"):
        load_mtp(str(draft_making.eagle1(tmp_path / "i")), target, 2)
    frozen = _edited(draft_making.frozen_kv(tmp_path / "j"), config={"target_kv_layer": 5})
    with pytest.raises(ModelLoadError, match="target_kv_layer=5 must be a layer of the target"):
        load_frozen_kv(frozen, target)
    smaller = _edited(draft_making.frozen_kv(tmp_path / "k"), config={"num_key_value_heads": 1})
    with pytest.raises(ModelLoadError, match="num_kv_heads=1, the target has 2"):
        load_frozen_kv(smaller, target)


def test_packed_matrices_need_their_scale(target: CausalLM, tmp_path: Path) -> None:
    folder = draft_making.eagle3(tmp_path / "a")
    lonely = _edited(folder, drop="norm.weight", **{"norm.weight_scale": torch.ones(48)})
    with pytest.raises(ModelLoadError, match="lacks its other half"):
        load_eagle(lonely, target)
