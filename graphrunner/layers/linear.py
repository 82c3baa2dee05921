"""Projections of a decoder block, each with what the kernels fuse around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from graphrunner.layers import ops
from graphrunner.layers.loading import WeightSlot, prefixed
from graphrunner.layers.norm import RMSNorm
from graphrunner.layers.options import LayerOptions
from graphrunner.layers.weight import Weight, quantize_int8


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a merged projection: their name in the checkpoint and how many there are."""

    name: str
    num_outputs: int


class PackedLinear(nn.Module):
    """One matrix made of several checkpoint tensors, stacked by output row.

    Memory is taken when the first tensor arrives, and a quantized matrix is packed as soon as the last one has, so
    loading never holds more than one projection twice.

    Args:
        parts: the stacked tensors, in row order.
        num_inputs: K.
        has_bias: whether every part has one.
        options: dtype, device, quantization.

    Attributes:
        packed: what kernels read; set by the first load.
    """

    packed: Weight
    weight: nn.Parameter | None
    weight_scale: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, parts: tuple[Part, ...], num_inputs: int, has_bias: bool, options: LayerOptions) -> None:
        super().__init__()
        self.parts = parts
        self.num_inputs = num_inputs
        self.num_outputs = sum(part.num_outputs for part in parts)
        self._options = options
        self._num_awaited = len(parts)
        self.register_parameter("weight", None)
        self.register_parameter("weight_scale", None)
        self.register_parameter("bias", None)
        if has_bias:
            self.bias = _frozen(torch.zeros(self.num_outputs, dtype=options.dtype, device=options.device))

    def weight_slots(self) -> Iterator[WeightSlot]:
        start = 0
        for part in self.parts:
            rows = slice(start, start + part.num_outputs)
            start += part.num_outputs
            yield WeightSlot(
                f"{part.name}.weight", (part.num_outputs, self.num_inputs), partial(self._put_weight, rows)
            )
            if self.bias is not None:
                yield WeightSlot(f"{part.name}.bias", (part.num_outputs,), partial(self._put_bias, rows))

    def _put_weight(self, rows: slice, tensor: Tensor) -> None:
        if self._num_awaited == len(self.parts):
            shape = (self.num_outputs, self.num_inputs)
            # A second load writes into the same memory, so that captured graphs stay valid.
            if self.weight is None or self.weight_scale is not None:
                self.packed = Weight(torch.empty(shape, dtype=self._options.weight_dtype, device=self._options.device))
        self.packed.data[rows].copy_(tensor)
        self._num_awaited -= 1
        if self._num_awaited == 0:
            self._num_awaited = len(self.parts)
            self._finish(self.packed.data)

    def _put_bias(self, rows: slice, tensor: Tensor) -> None:
        assert self.bias is not None
        self.bias.data[rows].copy_(tensor)

    def _finish(self, dense: Tensor) -> None:
        if not self._options.is_int8:
            self.packed = Weight(dense)
            self.weight = _frozen(dense)
            return
        fresh = quantize_int8(dense, self._options.int8_group_size)
        assert fresh.scale is not None
        if self.weight is not None and self.weight_scale is not None:
            self.weight.data.copy_(fresh.data)
            self.weight_scale.data.copy_(fresh.scale)
        else:
            self.weight, self.weight_scale = _frozen(fresh.data), _frozen(fresh.scale)
        self.packed = Weight(self.weight.data, self.weight_scale.data)


class NormLinear(PackedLinear):
    """RMSNorm, then one merged projection (q, k and v): [T, K] -> [T, N]."""

    def __init__(
        self, norm: RMSNorm, parts: tuple[Part, ...], num_inputs: int, has_bias: bool, options: LayerOptions
    ) -> None:
        super().__init__(parts, num_inputs, has_bias, options)
        self.norm = norm

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from prefixed("", self.norm)
        yield from super().weight_slots()

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm_linear(x, self.norm.weight, self.norm.eps, self.packed, self.bias)


class NormGateUp(PackedLinear):
    """RMSNorm, the gate and up projections in one, and act(gate) * up: [T, K] -> [T, N / 2]."""

    def __init__(
        self,
        norm: RMSNorm,
        parts: tuple[Part, Part],
        num_inputs: int,
        *,
        has_bias: bool,
        activation: str,
        options: LayerOptions,
    ) -> None:
        super().__init__(parts, num_inputs, has_bias, options)
        self.norm = norm
        self.activation = activation

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from prefixed("", self.norm)
        yield from super().weight_slots()

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            gate_up = ops.norm_linear(x, self.norm.weight, self.norm.eps, self.packed, self.bias)
            return ops.gate_mul(gate_up, self.activation)
        return ops.norm_gate_up(x, self.norm.weight, self.norm.eps, self.packed, self.activation)


class LinearResidual(PackedLinear):
    """A projection added onto the residual stream: [T, K], [T, N] -> [T, N]."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return ops.linear_residual(x, self.packed, self.bias, residual)


class Linear(PackedLinear):
    """A projection with nothing around it: [T, K] -> [T, N]."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm_linear(x, None, 0.0, self.packed, self.bias)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
