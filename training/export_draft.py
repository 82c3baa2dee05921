"""Write a trained draft as a checkpoint folder: config.json, int8 weights, a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from drafts import Draft, Eagle
from objective import Acceptance
from safetensors.torch import save_file
from torch import Tensor

_CARD = """# {title} for {target}

Trained by `training/train_draft.py` on text that the target model wrote itself, in answer to the prompts of
`training/prompts.py` (chats of several turns, tasks, stories, passages; greedy and at temperatures 0.7 and 1.0). No
other data were used. See docs/training-a-draft.md.

- licence: Apache-2.0, as the target's
- draft vocabulary: {vocab} of the target's {full_vocab} tokens
- weights: int8, one scale an output row

Greedy acceptance, printed by the script, on prompts about topics, people and places that no training prompt has
({drafts} drafts a round; the token that the target adds itself is not counted among the accepted):

| held-out prompts | drafts accepted a round | tokens a round | share of rounds that accept draft 1, 2, ... |
|---|---|---|---|
{rows}
"""


def export(draft: Draft, folder: Path, report: Mapping[str, Acceptance]) -> None:
    """Write `folder`; overwrites what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(draft)
    tensors: dict[str, Tensor] = {}
    for name, tensor in draft.state().items():
        tensors |= packed(name, tensor.detach().float().cpu())
    ids = draft.draft_ids.cpu()
    tensors["d2t"] = (ids - torch.arange(len(ids))).int()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    rows = "\n".join(
        f"| {kind} | {one.num_accepted:.2f} | {one.num_accepted + 1:.2f} | "
        f"{', '.join(f'{share:.2f}' for share in one.by_step)} |"
        for kind, one in report.items()
    )
    target = draft.target.config
    title = "EAGLE-3 draft" if isinstance(draft, Eagle) else f"{draft.num_steps} multi-token-prediction heads"
    name = f"{target.num_layers}-layer {target.model_type} model of width {target.hidden_size}"
    drafts = min(4, draft.num_steps)
    card = _CARD.format(
        title=title, target=name, vocab=len(ids), full_vocab=target.vocab_size, drafts=drafts, rows=rows
    )
    (folder / "README.md").write_text(card)
    (folder / "acceptance.json").write_text(json.dumps({k: asdict(one) for k, one in report.items()}, indent=2) + "\n")


def packed(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A matrix as int8 rows with a float16 scale each (`name` and `name`_scale); anything else as float32."""
    if tensor.dim() < 2:
        return {name: tensor}
    scale = (tensor.abs().amax(1, keepdim=True) / 127).clamp_min(2**-20).half()
    return {name: (tensor / scale.float()).round().clamp(-127, 127).to(torch.int8), f"{name}_scale": scale}


def _config(draft: Draft) -> dict[str, object]:
    """What Hugging Face configs of such drafts hold."""
    target = draft.target.config
    common = {
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": len(draft.draft_ids),
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_q_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.norm_eps,
        "rope_theta": target.rope.theta,
        "max_position_embeddings": target.max_position,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    if isinstance(draft, Eagle):
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **common,
            "num_hidden_layers": 1,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(draft.tap_layers)},
        }
    return {
        "architectures": ["DeepSeekMTPModel"],
        **common,
        "num_hidden_layers": target.num_layers,
        "num_nextn_predict_layers": draft.num_steps,
    }
