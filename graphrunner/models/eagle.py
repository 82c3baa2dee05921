"""EAGLE drafts: one decoder layer over the target's hidden states and the tokens after them.

At position t the layer reads the target's hidden state of token t and the embedding of token t + 1, and predicts
token t + 2. Where the target has not been yet, the draft's own output stands in for the hidden state.
Letters: T tokens, C hidden size.
Source: Li et al., EAGLE, 2024; Li et al., EAGLE-3, 2025.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from graphrunner.core.errors import ModelLoadError
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.kvcache.pool import KVLayerSpec, KVSpec
from graphrunner.layers import ops
from graphrunner.layers.block import BlockBuilder, rotary_tables
from graphrunner.layers.embedding import Embedding
from graphrunner.layers.linear import Linear, Part
from graphrunner.layers.loading import WeightSlot, fill_slots, prefixed
from graphrunner.layers.norm import RMSNorm
from graphrunner.models.causal_lm import CausalLM
from graphrunner.models.draft_checkpoint import DraftCheckpoint, open_draft
from graphrunner.models.draft_head import DraftHead, DraftVocabulary
from graphrunner.models.options import layer_options_of

_LAYER = "midlayer."


class EagleDraft(nn.Module):
    """An EAGLE-1 or EAGLE-3 draft, empty.

    Args:
        checkpoint: whose tensors decide the form.
        target: gives embeddings and head where the checkpoint has none.

    Attributes:
        config: of the draft's layer.
        aux_layers: layers of the target whose outputs `fuse` takes, 0 the first; empty for EAGLE-1, which takes its
            last hidden state.
        kv_spec: what the layer keeps for a token.
    """

    def __init__(self, checkpoint: DraftCheckpoint, target: CausalLM) -> None:
        super().__init__()
        config, shapes, options = checkpoint.config, checkpoint.shapes, layer_options_of(target.options)
        width, num_inputs = config.hidden_size, _fc_inputs(checkpoint)
        self.config = config
        self._target = (target,)  # in a tuple: its weights are not this module's
        self.is_eagle3 = f"{_LAYER}hidden_norm.weight" in shapes
        self.aux_layers = _aux_layers(checkpoint, target, num_inputs) if self.is_eagle3 else ()
        self.is_residual_normed = bool(checkpoint.raw.get("norm_before_residual", False))
        tables = rotary_tables(config, target.options.num_positions or config.max_position, target.options.device)
        block = BlockBuilder(config, options, tables, 0)
        self.fc = Linear((Part("fc", width),), num_inputs, "fc.bias" in shapes, options)
        self.input_norm = _norm_if("input_layernorm", checkpoint, block)
        self.hidden_norm = _norm_if("hidden_norm", checkpoint, block)
        heads = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
        parts = tuple(
            Part(f"self_attn.{name}_proj", count * config.head_dim) for name, count in zip("qkv", heads, strict=True)
        )
        self.qkv_proj = Linear(parts, width * (2 if self.is_eagle3 else 1), config.attention_bias, options)
        self.attention, self.o_proj = block.attention(), block.o_proj()
        self.gate_up_proj, self.down_proj = block.gate_up_proj("post_attention_layernorm"), block.down_proj()
        self.own_embedding = None
        if "embed_tokens.weight" in shapes:
            self.own_embedding = Embedding("embed_tokens", target.config.vocab_size, width, 1.0, options)
        self.vocabulary = _vocabulary(checkpoint, target)
        norm = RMSNorm("norm", width, config.norm_eps, target.options.device) if "norm.weight" in shapes else None
        own_head = "lm_head" if "lm_head.weight" in shapes else None
        self.head = DraftHead(norm, self.vocabulary, own=own_head, hidden_size=width, options=options)
        self.kv_spec = KVSpec((KVLayerSpec(config.num_kv_heads, config.head_dim),))

    @property
    def target(self) -> CausalLM:
        """The model that is drafted for."""
        return self._target[0]

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """What the layer reads of the target: [T, C], memory of its own.

        Args:
            hidden_states: EAGLE-3: outputs of `aux_layers` side by side; EAGLE-1: the last one, before the final norm.
        """
        return self.fc(hidden_states) if self.is_eagle3 else self.target.head.normed(hidden_states)

    def forward(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """One step over `batch.input_ids`, the token after each position; its KV is written.

        Args:
            hidden: model dtype [T, C], from `fuse` or an earlier step; may be overwritten.

        Returns:
            model dtype [T, C]: what the head reads, and the next step's `hidden`.

        In graph: yes. Sync: none.
        """
        embed_tokens = self.own_embedding or self.target.embed_tokens
        if self.is_eagle3:
            assert self.input_norm is not None and self.hidden_norm is not None, "an EAGLE-3 layer has both norms"
            inputs, normed = embed_tokens.beside(
                batch.input_ids, hidden, self.input_norm, self.hidden_norm, has_normed=self.is_residual_normed
            )
            residual = hidden if normed is None else normed
        else:
            residual = self.fc(torch.cat((embed_tokens(batch.input_ids), hidden), -1))
            norm = self.input_norm
            inputs = residual if norm is None else ops.norm(residual, norm.weight, norm.eps)
        attended = self.attention(self.qkv_proj(inputs), batch)
        hidden = self.o_proj(attended, residual)
        return self.down_proj(self.gate_up_proj(hidden), hidden)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every tensor the checkpoint must have."""
        yield from self.fc.weight_slots()
        norms = [norm for norm in (self.input_norm, self.hidden_norm) if norm is not None]
        block = (self.qkv_proj, self.attention, self.o_proj, self.gate_up_proj, self.down_proj)
        yield from prefixed(_LAYER, *norms, *block)
        if self.own_embedding is not None:
            yield from self.own_embedding.weight_slots()
        yield from self.head.weight_slots()
        if self.vocabulary.is_reduced:
            yield self.vocabulary.slot("d2t")


def load_eagle(name: str, target: CausalLM) -> EagleDraft:
    """Read an EAGLE draft for `target`.

    Raises:
        ModelLoadError: it cannot be read, or is made for another target; the message names the tensor or field.
    """
    checkpoint = open_draft(name, eagle_name, num_layers=1)
    if "fc.weight" not in checkpoint.shapes:
        raise ModelLoadError(f"{name}: tensor fc.weight is missing: this is not an EAGLE draft")
    draft = EagleDraft(checkpoint, target)
    fill_slots(draft.weight_slots(), _needed(checkpoint, draft), checkpoint_name=name)
    draft.head.finish_load(target.head.packed)
    return draft


def eagle_name(name: str) -> str:
    """A file's tensor name as `EagleDraft` has it."""
    return re.sub(r"^(layers\.0|midlayer)\.", _LAYER, name.removeprefix("model."))


def _needed(checkpoint: DraftCheckpoint, draft: EagleDraft) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in checkpoint.tensors(draft.target.options.device):
        if name != "d2t" or draft.vocabulary.is_reduced:
            yield name, tensor


def _fc_inputs(checkpoint: DraftCheckpoint) -> int:
    shape = checkpoint.shapes["fc.weight"]
    if len(shape) != 2 or shape[0] != checkpoint.config.hidden_size:
        raise ModelLoadError(f"{checkpoint.name}: tensor fc.weight has shape {list(shape)}, "
                             f"hidden_size is {checkpoint.config.hidden_size}")  # fmt: skip
    return shape[1]


def _aux_layers(checkpoint: DraftCheckpoint, target: CausalLM, num_inputs: int) -> tuple[int, ...]:
    """Configs count the layers that have run before the state is taken: 1 is the first layer's output."""
    num_layers, width = target.config.num_layers, target.config.hidden_size
    inner = checkpoint.raw.get("eagle_config")
    known = {**checkpoint.raw, **(inner if isinstance(inner, dict) else {})}
    counts = known.get("eagle_aux_hidden_state_layer_ids") or (2, num_layers // 2, num_layers - 3)
    field = "eagle_aux_hidden_state_layer_ids"
    if not isinstance(counts, list | tuple) or not all(isinstance(c, int) and 1 <= c <= num_layers for c in counts):
        raise ModelLoadError(f"{checkpoint.name}: {field}={counts!r} must be layers of the target, 1 to {num_layers}")
    if len(counts) * width != num_inputs:
        raise ModelLoadError(
            f"{checkpoint.name}: fc.weight reads {num_inputs} numbers, but {len(counts)} layers of a target of "
            f"hidden_size {width} have {len(counts) * width}: it was made for another target"
        )
    return tuple(count - 1 for count in counts)


def _vocabulary(checkpoint: DraftCheckpoint, target: CausalLM) -> DraftVocabulary:
    size = target.config.vocab_size
    own = checkpoint.number("vocab_size", size)
    if own != size:
        raise ModelLoadError(f"{checkpoint.name}: vocab_size={own}, the target has {size}: it was made for another one")
    num_drafted = checkpoint.shapes.get("d2t", (size,))[0]
    return DraftVocabulary(num_drafted, size, target.options.device)


def _norm_if(name: str, checkpoint: DraftCheckpoint, block: BlockBuilder) -> RMSNorm | None:
    return block.norm(name) if f"{_LAYER}{name}.weight" in checkpoint.shapes else None
