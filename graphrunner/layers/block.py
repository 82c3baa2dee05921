"""Builds the five ops of a decoder block from the model's numbers and Hugging Face's names."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrunner.attention.backend import AttentionSpec
from graphrunner.config.model_config import LayerType, ModelConfig, RopeConfig
from graphrunner.layers.attention import PagedAttention
from graphrunner.layers.linear import Linear, LinearResidual, NormGateUp, NormLinear, Part
from graphrunner.layers.norm import NormResidual, RMSNorm
from graphrunner.layers.options import LayerOptions
from graphrunner.layers.rotary import RotaryTable, rotary_table


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """The tables of a model: one for full-attention layers, one for sliding ones (the same unless stated)."""

    full: RotaryTable
    sliding: RotaryTable


def rotary_tables(config: ModelConfig, num_positions: int, device: torch.device) -> RotaryTables:
    """Both tables; they are shared by all layers."""
    full = rotary_table(config.rope, config.head_dim, num_positions, config.max_position, device)
    if config.rope.local_theta is None:
        return RotaryTables(full, full)
    local = RopeConfig(theta=config.rope.local_theta)
    return RotaryTables(full, rotary_table(local, config.head_dim, num_positions, config.max_position, device))


@dataclass(frozen=True, slots=True)
class BlockBuilder:
    """The parts of block `index`, under the names that Llama-like checkpoints use.

    Attributes:
        config: the model's numbers.
        options: dtype, device, packing.
        tables: shared rotary tables.
        index: which block.
        norm_offset: see RMSNorm.
    """

    config: ModelConfig
    options: LayerOptions
    tables: RotaryTables
    index: int
    norm_offset: float = 0.0

    def norm(self, name: str, size: int | None = None) -> RMSNorm:
        """An RMSNorm whose arithmetic the next op does."""
        width = size or self.config.hidden_size
        return RMSNorm(name, width, self.config.norm_eps, self.options.device, self.norm_offset)

    def norm_residual(self, name: str) -> NormResidual:
        """A norm of a branch's output that ends in the residual stream."""
        config = self.config
        return NormResidual(name, config.hidden_size, config.norm_eps, self.options.device, self.norm_offset)

    def qkv_proj(self, norm: str) -> NormLinear:
        """Norm and merged q, k, v projection."""
        config = self.config
        parts = (
            Part("self_attn.q_proj", config.num_q_heads * config.head_dim),
            Part("self_attn.k_proj", config.num_kv_heads * config.head_dim),
            Part("self_attn.v_proj", config.num_kv_heads * config.head_dim),
        )
        return NormLinear(self.norm(norm), parts, config.hidden_size, config.attention_bias, self.options)

    def attention(self) -> PagedAttention:
        """The layer's own mix of window, cap, q/k norm and rotary table."""
        config = self.config
        is_sliding = config.layer_types[self.index] is LayerType.SLIDING
        table = self.tables.sliding if is_sliding else self.tables.full
        has_rope = self.index not in config.no_rope_layers
        norms: tuple[RMSNorm, ...] = ()
        if config.qk_norm:
            norms = tuple(self.norm(f"self_attn.{name}_norm", config.head_dim) for name in ("q", "k"))
        spec = AttentionSpec(
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            sliding_window=config.sliding_window if is_sliding else None,
            soft_cap=config.attn_soft_cap,
            q_norm_weight=norms[0].weight.data if norms else None,
            k_norm_weight=norms[1].weight.data if norms else None,
            norm_eps=config.norm_eps,
            rope_cos=table.cos if has_rope else None,
            rope_sin=table.sin if has_rope else None,
        )
        return PagedAttention(spec, self.index, norms)

    def o_proj(self) -> LinearResidual:
        """Output projection of attention, ending in the residual stream."""
        return LinearResidual((self._o_part,), self._attention_width, self.config.attention_out_bias, self.options)

    def plain_o_proj(self) -> Linear:
        """Output projection of attention alone."""
        return Linear((self._o_part,), self._attention_width, self.config.attention_out_bias, self.options)

    def gate_up_proj(self, norm: str) -> NormGateUp:
        """Norm, merged gate and up projection, gated activation."""
        config = self.config
        parts = (
            Part("mlp.gate_proj", config.intermediate_size),
            Part("mlp.up_proj", config.intermediate_size),
        )
        return NormGateUp(
            self.norm(norm),
            parts,
            config.hidden_size,
            has_bias=config.mlp_bias,
            activation=config.activation.value,
            options=self.options,
        )

    def down_proj(self) -> LinearResidual:
        """Output projection of the feed-forward, ending in the residual stream."""
        return LinearResidual((self._down_part,), self.config.intermediate_size, self.config.mlp_bias, self.options)

    def plain_down_proj(self) -> Linear:
        """Output projection of the feed-forward alone."""
        return Linear((self._down_part,), self.config.intermediate_size, self.config.mlp_bias, self.options)

    @property
    def _attention_width(self) -> int:
        return self.config.num_q_heads * self.config.head_dim

    @property
    def _o_part(self) -> Part:
        return Part("self_attn.o_proj", self.config.hidden_size)

    @property
    def _down_part(self) -> Part:
        return Part("mlp.down_proj", self.config.hidden_size)
