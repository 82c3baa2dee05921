"""Multi-token-prediction heads: decoder layers in a row, each predicting one token further than the one before.

At position t head i reads a hidden state (head 0: the target's normed last one; head i: the output of head i - 1) and
the embedding of token t + 1 + i, and predicts token t + 2 + i.
Letters: T tokens, C hidden size.
Source: Gloeckle et al., Better & Faster Large Language Models via Multi-token Prediction, 2024; DeepSeek-AI,
DeepSeek-V3 Technical Report, 2024, section 2.2; the MiMo and Qwen3-Next checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from graphrunner.core.errors import ModelLoadError
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.kvcache.pool import KVLayerSpec, KVSpec
from graphrunner.layers import ops
from graphrunner.layers.block import BlockBuilder, rotary_tables
from graphrunner.layers.linear import Linear, Part
from graphrunner.layers.loading import WeightSlot, fill_slots, prefixed
from graphrunner.layers.norm import RMSNorm
from graphrunner.models.causal_lm import CausalLM
from graphrunner.models.draft_checkpoint import DraftCheckpoint, open_draft
from graphrunner.models.draft_head import DraftHead, DraftVocabulary
from graphrunner.models.llama import LlamaDecoderLayer
from graphrunner.models.options import layer_options_of


@dataclass(frozen=True, slots=True)
class MTPLayout:
    """How a family of checkpoints names and joins things.

    Attributes:
        layer: expression of a head's tensors in the file; its group is the head's number.
        renamed: the rest of a name, to our name for it; what is not listed stays.
        is_hidden_first: the joining matrix reads [hidden, embedding]; else [embedding, hidden].
        is_norm_plus_one: norm weights are stored less one.
    """

    layer: str
    renamed: tuple[tuple[str, str], ...] = ()
    is_hidden_first: bool = False
    is_norm_plus_one: bool = False


DEEPSEEK = MTPLayout(
    r"^(?:model\.)?layers\.(\d+)\.",
    (("shared_head.norm", "final_norm"), ("shared_head.head", "lm_head")),
)
MIMO = MTPLayout(
    r"^(?:model\.)?mtp_layers\.(\d+)\.",
    (
        ("token_layernorm", "enorm"),
        ("hidden_layernorm", "hnorm"),
        ("input_proj", "eh_proj"),
        ("final_layernorm", "final_norm"),
    ),
    is_hidden_first=True,
)
QWEN = MTPLayout(
    r"^mtp\.(?:layers\.(\d+)\.)?",
    (
        ("pre_fc_norm_embedding", "enorm"),
        ("pre_fc_norm_hidden", "hnorm"),
        ("fc", "eh_proj"),
        ("norm", "final_norm"),
    ),
    is_norm_plus_one=True,
)
_LAYOUT_OF = {"DeepSeek": DEEPSEEK, "MiMo": MIMO, "Qwen": QWEN}


class MTPHead(nn.Module):
    """One layer and what joins its two inputs."""

    def __init__(self, block: BlockBuilder, layout: MTPLayout) -> None:
        super().__init__()
        width = block.config.hidden_size
        self.enorm, self.hnorm = block.norm("enorm"), block.norm("hnorm")
        self.eh_proj = Linear((Part("eh_proj", width),), 2 * width, False, block.options)
        self.layer = LlamaDecoderLayer(block)
        self._is_hidden_first = layout.is_hidden_first

    def forward(self, hidden: Tensor, embedded: Tensor, batch: ForwardBatch) -> Tensor:
        pair = (
            ops.norm(embedded, self.enorm.weight, self.enorm.eps),
            ops.norm(hidden, self.hnorm.weight, self.hnorm.eps),
        )
        joined = self.eh_proj(torch.cat(pair[::-1] if self._is_hidden_first else pair, -1))
        return self.layer(joined, batch)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from prefixed("", self.enorm, self.hnorm, self.eh_proj, self.layer)


class MTPDraft(nn.Module):
    """Heads for a target, empty.

    Attributes:
        num_heads: how many tokens they predict.
        kv_spec: what they keep for a token, one layer a head.
    """

    def __init__(self, checkpoint: DraftCheckpoint, layout: MTPLayout, target: CausalLM, num_heads: int) -> None:
        super().__init__()
        config, device = checkpoint.config, target.options.device
        options = layer_options_of(target.options)
        if config.hidden_size != target.config.hidden_size:
            raise ModelLoadError(
                f"{checkpoint.name}: hidden_size={config.hidden_size}, the target has {target.config.hidden_size}: "
                "it was made for another target"
            )
        self._target = (target,)  # in a tuple: its weights are not this module's
        self.num_heads = num_heads
        tables = rotary_tables(config, target.options.num_positions or config.max_position, device)
        offset = 1.0 if layout.is_norm_plus_one else 0.0
        self.layers = nn.ModuleList(
            MTPHead(BlockBuilder(config, options, tables, index, offset), layout) for index in range(num_heads)
        )
        size = target.config.vocab_size
        self.vocabulary = DraftVocabulary(checkpoint.shapes.get("d2t", (size,))[0], size, device)
        self.heads = nn.ModuleList(
            DraftHead(
                RMSNorm("final_norm", config.hidden_size, config.norm_eps, device, offset),
                self.vocabulary,
                own="lm_head" if f"{index}.lm_head.weight" in checkpoint.shapes else None,
                hidden_size=config.hidden_size,
                options=options,
            )
            for index in range(num_heads)
        )
        self.kv_spec = KVSpec((KVLayerSpec(config.num_kv_heads, config.head_dim),) * num_heads)

    @property
    def target(self) -> CausalLM:
        """The model that is drafted for."""
        return self._target[0]

    def start(self, hidden_states: Tensor) -> Tensor:
        """What head 0 reads: the target's hidden states, [T, C] before the final norm, normed."""
        return self.target.head.normed(hidden_states)

    def forward(self, index: int, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Head `index` over `batch.input_ids`, the token 1 + index after each position; its KV is written.

        Args:
            hidden: model dtype [T, C], from `start` or from the head before.

        Returns:
            model dtype [T, C]: what its output head and the next layer read. In graph: yes. Sync: none.
        """
        return self.layers[index](hidden, self.target.embed_tokens(batch.input_ids), batch)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every tensor the checkpoint must have, as `HEAD.NAME`."""
        for index, (layer, head) in enumerate(zip(self.layers, self.heads, strict=True)):
            yield from prefixed(f"{index}.", layer, head)
        if self.vocabulary.is_reduced:
            yield self.vocabulary.slot("d2t")


def load_mtp(name: str, target: CausalLM, max_heads: int) -> MTPDraft:
    """Read the heads of a folder, at most `max_heads`; the target itself may lie in it too.

    Raises:
        ModelLoadError: it has no heads, or some that are not read here; the message names the tensor.
    """
    layout, first = _layout_of(name)
    num_heads = min(_count(name, layout, first), max_heads)
    checkpoint = open_draft(name, partial(_own_name, layout, first), num_layers=num_heads)
    draft = MTPDraft(checkpoint, layout, target, num_heads)
    fill_slots(draft.weight_slots(), _needed(checkpoint, draft), checkpoint_name=name)
    for head in draft.heads:
        head.finish_load(target.head.packed)
    return draft


def count_mtp_heads(name: str) -> int:
    """How many heads a folder has; only headers are read. Raises ModelLoadError when there are none."""
    return _count(name, *_layout_of(name))


def _count(name: str, layout: MTPLayout, first: int) -> int:
    checkpoint = open_draft(name, partial(_own_name, layout, first))
    found = {int(key.split(".", 1)[0]) for key in checkpoint.shapes if re.match(r"\d+\.", key)}
    if found != set(range(len(found))) or not found:
        raise ModelLoadError(f"{name}: has no multi-token-prediction heads")
    return len(found)


def _layout_of(name: str) -> tuple[MTPLayout, int]:
    """The family of a folder, and the number of its first head in tensor names."""
    probe = open_draft(name, str)
    architectures = probe.raw.get("architectures")
    family = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    layout = next((one for key, one in _LAYOUT_OF.items() if family.startswith(key)), None)
    if layout is None:
        known = ", ".join(_LAYOUT_OF)
        raise ModelLoadError(f"{name}: architectures={architectures!r} has no known multi-token heads (known: {known})")
    # DeepSeek numbers its heads on from the layers of the target.
    first = probe.number("num_hidden_layers", 1) if layout is DEEPSEEK else 0
    return layout, first


def _own_name(layout: MTPLayout, first: int, name: str) -> str:
    """`HEAD.NAME` of a head's tensor, the same name for everything else."""
    match = re.match(layout.layer, name)
    if match is None:
        return name
    index = int(match.group(1) or 0) - (first if match.group(1) else 0)
    if index < 0:
        return name  # a layer of the target
    rest = name[match.end() :]
    for theirs, ours in layout.renamed:
        if rest.startswith(f"{theirs}."):
            rest = ours + rest.removeprefix(theirs)
            break
    return f"{index}.{rest}"


def _needed(checkpoint: DraftCheckpoint, draft: MTPDraft) -> Iterator[tuple[str, Tensor]]:
    """The heads' tensors; embeddings that repeat the target's, more heads and the target itself are passed over."""
    for name, tensor in checkpoint.tensors(draft.target.options.device):
        match = re.match(r"(\d+)\.(.*)", name)
        if match is not None:
            if int(match.group(1)) < draft.num_heads and match.group(2) != "embed_tokens.weight":
                yield name, tensor
        elif name == "d2t" and draft.vocabulary.is_reduced:
            yield name, tensor
