"""A draft without KV of its own: its attention reads the pages that a layer of the target has filled already.

It is fed the target's last hidden state of the newest computed token and the token after it, then its own output.
Whatever it drafts, the keys it sees are the same, "frozen" ones: nothing is stored, nothing must be kept up to date.
Letters: R requests, C hidden size, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from graphrunner.core.errors import ModelLoadError
from graphrunner.core.forward_batch import ForwardBatch, KVLayer
from graphrunner.kernels import reference
from graphrunner.kvcache.pool import KVSpec
from graphrunner.layers import ops
from graphrunner.layers.attention import PagedAttention
from graphrunner.layers.block import BlockBuilder, rotary_tables
from graphrunner.layers.linear import Linear, NormLinear, Part
from graphrunner.layers.loading import WeightSlot, fill_slots, prefixed
from graphrunner.layers.norm import RMSNorm
from graphrunner.models.causal_lm import CausalLM
from graphrunner.models.draft_checkpoint import DraftCheckpoint, open_draft
from graphrunner.models.draft_head import DraftHead, DraftVocabulary
from graphrunner.models.options import layer_options_of


class FrozenKVDraft(nn.Module):
    """The head, empty.

    Args:
        checkpoint: names as in `weight_slots`; config.json says `target_kv_layer`, -1 the last one.
    """

    kv_spec = KVSpec(())

    def __init__(self, checkpoint: DraftCheckpoint, target: CausalLM) -> None:
        super().__init__()
        config, device = checkpoint.config, target.options.device
        options = layer_options_of(target.options)
        _check_fits(checkpoint, target)
        self._target = (target,)  # in a tuple: its weights are not this module's
        self._tables = rotary_tables(config, target.options.num_positions or config.max_position, device).full
        self._head_dim = config.head_dim
        block, width = BlockBuilder(config, options, rotary_tables(config, 1, device), 0), config.hidden_size
        self.enorm, self.hnorm = block.norm("enorm"), block.norm("hnorm")
        self.eh_proj = Linear((Part("eh_proj", width),), 2 * width, False, options)
        queries = (Part("self_attn.q_proj", config.num_q_heads * config.head_dim),)
        self.q_proj = NormLinear(block.norm("input_layernorm"), queries, width, False, options)
        index = _kv_layer(checkpoint, target)
        source = next(part for part in target.layers[index].modules() if isinstance(part, PagedAttention)).spec
        # Queries come rotated, keys are stored so; a cache in fp8 is read with the scales it is written with.
        spec = replace(
            block.attention().spec, rope_cos=None, rope_sin=None, k_scale=source.k_scale, v_scale=source.v_scale
        )
        self.attention = PagedAttention(spec, index)
        self.o_proj = block.o_proj()
        self.gate_up_proj, self.down_proj = block.gate_up_proj("post_attention_layernorm"), block.down_proj()
        size = target.config.vocab_size
        self.vocabulary = DraftVocabulary(checkpoint.shapes.get("d2t", (size,))[0], size, device)
        self.head = DraftHead(
            RMSNorm("norm", width, config.norm_eps, device),
            self.vocabulary,
            own="lm_head" if "lm_head.weight" in checkpoint.shapes else None,
            hidden_size=width,
            options=options,
        )

    @property
    def target(self) -> CausalLM:
        """The model that is drafted for."""
        return self._target[0]

    def start(self, hidden_states: Tensor) -> Tensor:
        """What the first step reads: the target's hidden states, [R, C] before the final norm, normed."""
        return self.target.head.normed(hidden_states)

    def forward(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """One step of every row.

        Args:
            hidden: model dtype [R, C], from `start` or an earlier step.
            batch: one token a request: `input_ids` as in a decode step, `positions` for the rotation, `seq_lens` and
                `slot_mapping` of the newest token whose KV exists.

        Returns:
            model dtype [R, C]. In graph: yes. Sync: none.
        """
        embedded = self.target.embed_tokens(batch.input_ids)
        pair = (
            ops.norm(embedded, self.enorm.weight, self.enorm.eps),
            ops.norm(hidden, self.hnorm.weight, self.hnorm.eps),
        )
        joined = self.eh_proj(torch.cat(pair, -1))
        queries = self.q_proj(joined).view(joined.shape[0], -1, self._head_dim)
        queries = reference.apply_rope(queries, self._tables.cos, self._tables.sin, batch.positions).flatten(1)
        # The backend stores a key and a value with each query. Given those that are there, it changes nothing.
        keys, values = self._stored(batch.kv_layers[self.attention.layer_index], batch.slot_mapping, queries.dtype)
        attended = self.attention(torch.cat((queries, keys, values), -1), batch)
        hidden = self.o_proj(attended, joined)
        return self.down_proj(self.gate_up_proj(hidden), hidden)

    def _stored(self, layer: KVLayer, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values at `slots`: [R, Hk * D] each."""
        k_scale, v_scale = self.attention.spec.cache_scales(layer.k)
        keys, values = (half.view(-1, half.shape[2] * half.shape[3])[slots].to(dtype) for half in (layer.k, layer.v))
        return keys * k_scale, values * v_scale

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every tensor the checkpoint must have."""
        norms = (self.enorm, self.hnorm)
        yield from prefixed("", *norms, self.eh_proj, self.q_proj, self.o_proj, self.gate_up_proj, self.down_proj)
        yield from self.head.weight_slots()
        if self.vocabulary.is_reduced:
            yield self.vocabulary.slot("d2t")


def load_frozen_kv(name: str, target: CausalLM) -> FrozenKVDraft:
    """Read a frozen-KV head for `target`. Raises ModelLoadError, which names the tensor or field."""
    checkpoint = open_draft(name, str, num_layers=1)
    draft = FrozenKVDraft(checkpoint, target)
    tensors = checkpoint.tensors(target.options.device)
    needed = ((n, t) for n, t in tensors if n != "d2t" or draft.vocabulary.is_reduced)
    fill_slots(draft.weight_slots(), needed, checkpoint_name=name)
    draft.head.finish_load(target.head.packed)
    return draft


def _kv_layer(checkpoint: DraftCheckpoint, target: CausalLM) -> int:
    index, num_layers = checkpoint.raw.get("target_kv_layer", -1), target.config.num_layers
    if isinstance(index, bool) or not isinstance(index, int) or not -num_layers <= index < num_layers:
        raise ModelLoadError(
            f"{checkpoint.name}: target_kv_layer={index!r} must be a layer of the target, which has {num_layers}"
        )
    return index % num_layers


def _check_fits(checkpoint: DraftCheckpoint, target: CausalLM) -> None:
    for field in ("hidden_size", "num_q_heads", "num_kv_heads", "head_dim"):
        own, theirs = getattr(checkpoint.config, field), getattr(target.config, field)
        if own != theirs:
            raise ModelLoadError(f"{checkpoint.name}: {field}={own}, the target has {theirs}: it cannot read its KV")
