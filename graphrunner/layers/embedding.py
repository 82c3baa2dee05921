"""From token ids to rows, and from rows to logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from graphrunner.kernels.packed_weight import Weight
from graphrunner.layers import ops
from graphrunner.layers.linear import PackedLinear, Part, kept_in_place
from graphrunner.layers.loading import WeightSlot
from graphrunner.layers.norm import RMSNorm
from graphrunner.layers.options import LayerOptions
from graphrunner.weights.quantize import quantize


class Embedding(nn.Module):
    """Token embeddings: int [T] -> [T, hidden_size]; never quantized, for a step reads only its own rows.

    Args:
        name: in the checkpoint.
        scale: multiplies the rows, rounded to the compute dtype first (Gemma).
    """

    weight: nn.Parameter | None

    def __init__(self, name: str, vocab_size: int, hidden_size: int, scale: float, options: LayerOptions) -> None:
        super().__init__()
        self.name = name
        self.shape = (vocab_size, hidden_size)
        self._options = options
        self.register_parameter("weight", None)
        self._scale = torch.tensor(scale).to(options.dtype).item()

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{self.name}.weight", self.shape, self._put)

    def _put(self, tensor: Tensor) -> None:
        if self.weight is None:
            rows = torch.empty(self.shape, dtype=self._options.weight_dtype, device=self._options.device)
            self.weight = nn.Parameter(rows, requires_grad=False)
        self.weight.data.copy_(tensor)

    def forward(self, input_ids: Tensor) -> Tensor:
        assert self.weight is not None, "weights are not loaded"
        return ops.embedding(input_ids, self.weight, self._scale, self._options.dtype)

    def beside(
        self, input_ids: Tensor, hidden: Tensor, own_norm: RMSNorm, hidden_norm: RMSNorm, *, has_normed: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Embeddings and hidden rows [T, hidden_size], each normed, side by side: [T, 2 * hidden_size].

        Args:
            has_normed: return the normed hidden rows by themselves, too.
        """
        assert self.weight is not None, "weights are not loaded"
        return ops.embed_beside(
            input_ids,
            self.weight,
            self._scale,
            hidden,
            ((own_norm.weight, own_norm.eps), (hidden_norm.weight, hidden_norm.eps)),
            has_normed=has_normed,
        )


class LMHead(nn.Module):
    """Final norm, projection onto the vocabulary, optional soft cap: [rows, hidden_size] -> float32 [rows, vocab].

    Args:
        norm: the model's final norm.
        embedding: whose matrix is used when the checkpoint ties the two; None for a head with its own weight.
        soft_cap: logits become cap * tanh(logits / cap).

    Attributes:
        packed: what kernels read; set by `finish_load`.
    """

    packed: Weight

    def __init__(
        self,
        norm: RMSNorm,
        vocab_size: int,
        hidden_size: int,
        *,
        embedding: Embedding | None,
        soft_cap: float | None,
        options: LayerOptions,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.soft_cap = soft_cap
        self._options = replace(options, quantization=options.quantization.of_head)
        # A plain tuple keeps the tied module out of this module's own parameters.
        self._tied: tuple[Embedding, ...] = (embedding,) if embedding is not None else ()
        self.proj = None
        if embedding is None:
            self.proj = PackedLinear((Part("lm_head", vocab_size),), hidden_size, False, self._options)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.norm.weight_slots()
        if self.proj is not None:
            yield from self.proj.weight_slots()

    def finish_load(self) -> None:
        """Take the loaded matrix; a tied one is packed a second time when projections are quantized."""
        if self.proj is not None:
            self.packed = self.proj.packed
            return
        weight = self._tied[0].weight
        assert weight is not None, "embeddings are loaded before the head"
        dense = weight.data
        packed = quantize(dense, self._options.quantization, self._options.int8_group_size)
        self.packed = kept_in_place(packed, getattr(self, "packed", None), self._options)

    def normed(self, rows: Tensor) -> Tensor:
        """The final norm alone: [rows, hidden_size], same dtype."""
        return ops.norm(rows, self.norm.weight, self.norm.eps)

    def greedy_tokens(self, rows: Tensor) -> Tensor | None:
        """The likeliest token of each row, int32 [rows], without float32 logits; None where it takes the logits."""
        if self.soft_cap is not None:
            return None  # a cap can make equals of two logits
        return ops.norm_linear_argmax(rows, self.norm.weight, self.norm.eps, self.packed)

    def forward(self, rows: Tensor) -> Tensor:
        logits = ops.norm_linear(rows, self.norm.weight, self.norm.eps, self.packed, None).float()
        return logits if self.soft_cap is None else ops.soft_cap(logits, self.soft_cap)
