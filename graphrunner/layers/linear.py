"""Projections of a decoder block, each with what the kernels fuse around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from graphrunner.config.quantization import Quantization
from graphrunner.core.errors import ModelLoadError
from graphrunner.kernels.packed_weight import Weight, dense_weight
from graphrunner.layers import ops
from graphrunner.layers.loading import WeightSlot, prefixed
from graphrunner.layers.norm import RMSNorm
from graphrunner.layers.options import LayerOptions
from graphrunner.weights.quantize import for_cpu, quantize, stack


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a merged projection: their name in the checkpoint and how many there are."""

    name: str
    num_outputs: int


class PackedLinear(nn.Module):
    """One matrix made of several checkpoint tensors, stacked by output row.

    Memory is taken when the first tensor arrives, and a quantized matrix is packed as soon as the last one has, so
    loading never holds more than one projection twice. A part that comes packed stays as it is, whatever `options`
    ask for; parts packed differently are widened.

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
    weight_zero: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, parts: tuple[Part, ...], num_inputs: int, has_bias: bool, options: LayerOptions) -> None:
        super().__init__()
        self.parts = parts
        self.num_inputs = num_inputs
        self.num_outputs = sum(part.num_outputs for part in parts)
        self._options = options
        self._arrived: dict[int, Weight] = {}
        self._staging: Tensor | None = None
        for name in ("weight", "weight_scale", "weight_zero", "bias"):
            self.register_parameter(name, None)
        if has_bias:
            self.bias = _frozen(torch.zeros(self.num_outputs, dtype=options.dtype, device=options.device))

    def weight_slots(self) -> Iterator[WeightSlot]:
        start = 0
        for index, part in enumerate(self.parts):
            rows = slice(start, start + part.num_outputs)
            start += part.num_outputs
            yield WeightSlot(
                f"{part.name}.weight",
                (part.num_outputs, self.num_inputs),
                partial(self._put_dense, index, rows),
                partial(self._put_packed, index),
            )
            if self.bias is not None:
                yield WeightSlot(f"{part.name}.bias", (part.num_outputs,), partial(self._put_bias, rows))

    def _put_dense(self, index: int, rows: slice, tensor: Tensor) -> None:
        if self._staging is None:
            self._staging = self._rows_for_dense()
        self._staging[rows].copy_(tensor)
        self._put(index, dense_weight(self._staging[rows]))

    def _put_packed(self, index: int, weight: Weight) -> None:
        self._put(index, weight.to(self._options.device))

    def _put_bias(self, rows: slice, tensor: Tensor) -> None:
        assert self.bias is not None
        self.bias.data[rows].copy_(tensor)

    def _put(self, index: int, weight: Weight) -> None:
        self._arrived[index] = weight
        if len(self._arrived) < len(self.parts):
            return
        parts = [self._arrived[i] for i in range(len(self.parts))]
        if self._staging is not None and all(part.is_dense for part in parts):
            whole = quantize(self._staging, self._options.quantization, self._options.int8_group_size)
        else:
            whole = stack(parts)
        self._arrived, self._staging = {}, None
        self.packed = kept_in_place(whole, getattr(self, "packed", None), self._options)
        self.weight = _frozen(self.packed.data)
        self.weight_scale = None if self.packed.scale is None else _frozen(self.packed.scale)
        self.weight_zero = None if self.packed.zero is None else _frozen(self.packed.zero)

    def _rows_for_dense(self) -> Tensor:
        """Where plain parts are gathered: the old weights' own place when they stay dense."""
        is_kept = self._options.quantization is Quantization.NONE and hasattr(self, "packed") and self.packed.is_dense
        if is_kept:
            return self.packed.data
        shape = (self.num_outputs, self.num_inputs)
        return torch.empty(shape, dtype=self._options.weight_dtype, device=self._options.device)


def kept_in_place(fresh: Weight, old: Weight | None, options: LayerOptions) -> Weight:
    """`fresh` as the device's kernels read it, in the memory of `old` when there is one: captured graphs hold pointers.

    Raises:
        ModelLoadError: the two are packed differently.
    """
    if options.device.type == "cpu":
        fresh = for_cpu(fresh, options.weight_dtype)
    if fresh.is_dense:
        fresh = dense_weight(fresh.data.to(options.weight_dtype))
    if old is None:
        return fresh
    if not old.is_like(fresh) or [one.shape for one in old.tensors] != [one.shape for one in fresh.tensors]:
        raise ModelLoadError(
            f"the weights are packed as {fresh.layout.value}, those they replace as {old.layout.value}"
        )
    for place, values in zip(old.tensors, fresh.tensors, strict=True):
        if place.data_ptr() != values.data_ptr():
            place.copy_(values)
    return old


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
