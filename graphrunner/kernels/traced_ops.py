"""The operations models are written in, as torch operators that a compiler joins: norms, activations, sums, products.

A product of dense weights is the library's. One of packed weights is a single opaque operator around the kernel of
kernels/triton/quantized_linear.py, since widening a weight in plain operators would write all of it to memory; its
norm, activation and residual stay outside, where they are joined with what stands beside them. Only the norm before an
fp8 product belongs to it: rows are rounded to fp8 straight from the norm, and rounded twice they would differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphrunner.kernels import reference
from graphrunner.kernels.packed_weight import Weight, WeightLayout, dequantize
from graphrunner.kernels.tracing import tracing


def norm_linear(x: Tensor, norm_weight: Tensor | None, eps: float, weight: Weight, bias: Tensor | None) -> Tensor:
    """As layers.ops.norm_linear."""
    if weight.is_dense:
        return reference.norm_linear(x, norm_weight, eps, weight.data, bias)
    if norm_weight is not None and weight.layout is not WeightLayout.FP8:
        x, norm_weight = reference.rms_norm(x, norm_weight, eps), None
    return torch.ops.graphrunner.packed_linear(
        x, norm_weight, eps, weight.data, weight.scale, weight.zero, weight.layout.value, weight.group_size,
        weight.row_block, bias,
    )  # fmt: skip


def norm_gate_up(x: Tensor, norm_weight: Tensor | None, eps: float, gate_up_weight: Weight, activation: str) -> Tensor:
    """As layers.ops.norm_gate_up."""
    return reference.gate_mul(norm_linear(x, norm_weight, eps, gate_up_weight, None), activation)


def linear_residual(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """As layers.ops.linear_residual; `residual` is left as it is."""
    return residual + norm_linear(x, None, 0.0, weight, bias)


def _packed_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    data: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    layout: str,
    group_size: int,
    row_block: int,
    bias: Tensor | None,
) -> Tensor:
    weight = Weight(WeightLayout(layout), data, scale, zero, group_size, row_block)
    if not x.is_cuda:
        return reference.norm_linear(x, norm_weight, eps, dequantize(weight), bias)
    from graphrunner.kernels.triton import quantized_linear

    with tracing(False):
        return quantized_linear.norm_linear(x.contiguous(), norm_weight, eps, weight, bias)


_library = torch.library.Library("graphrunner", "FRAGMENT")
_library.define(
    "packed_linear(Tensor x, Tensor? norm_weight, float eps, Tensor data, Tensor scale, Tensor? zero, str layout, "
    "int group_size, int row_block, Tensor? bias) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")


@torch.library.register_fake("graphrunner::packed_linear")
def _packed_linear_shape(x, norm_weight, eps, data, scale, zero, layout, group_size, row_block, bias):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], data.shape[0])
