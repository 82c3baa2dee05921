"""The CPU's projections with one order of summation for every row count: the same bits alone and in any batch.

The C++ kernels take up to 16 rows at a time and add in an order that does not depend on the others (linear.cpp), so
more rows are cut into such groups. What they do not serve (other dtypes, no compiler) is multiplied row by row. Slower
for prompts: the weight is read once a group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graphrunner.kernels import reference
from graphrunner.kernels.cpu import ops as cpu_ops
from graphrunner.kernels.packed_weight import Weight, WeightLayout, dequantize

MAX_STREAMED_ROWS = 16
"""kMaxStreamedRows of linear.cpp."""


def norm_linear(x: Tensor, norm_weight: Tensor | None, eps: float, weight: Weight, bias: Tensor | None) -> Tensor:
    """As layers.ops.norm_linear."""
    if _is_streamed(x, weight):
        return _grouped(lambda rows: cpu_ops.norm_linear(rows, norm_weight, eps, weight.data, bias, weight.scale), x)
    matrix = dequantize(weight).to(x.dtype)
    return _by_row(lambda row: reference.norm_linear(row, norm_weight, eps, matrix, bias), x)


def norm_gate_up(x: Tensor, norm_weight: Tensor | None, eps: float, gate_up_weight: Weight, activation: str) -> Tensor:
    """As layers.ops.norm_gate_up."""
    weight = gate_up_weight
    if _is_streamed(x, weight):
        return _grouped(
            lambda rows: cpu_ops.norm_gate_up(rows, norm_weight, eps, weight.data, activation, weight.scale), x
        )
    matrix = dequantize(weight).to(x.dtype)
    return _by_row(lambda row: reference.norm_gate_up(row, norm_weight, eps, matrix, activation), x)


def linear_residual(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """As layers.ops.linear_residual."""
    return residual + norm_linear(x, None, 0.0, weight, bias)


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A transcendental of each number, row by row: vector code rounds it otherwise than the code for what is left over,
    and which number is left over depends on how many there are."""
    return _by_row(function, x)


def _is_streamed(x: Tensor, weight: Weight) -> bool:
    has_layout = weight.layout in (WeightLayout.DENSE, WeightLayout.INT8)
    return has_layout and x.dtype is torch.float32 and cpu_ops.is_available()


def _grouped(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.shape[0] <= MAX_STREAMED_ROWS:
        return run(x)
    return torch.cat([run(rows) for rows in x.split(MAX_STREAMED_ROWS)])


def _by_row(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.shape[0] <= 1:
        return run(x.clone())
    # Copied, because a library's product also depends on how a row's address is aligned.
    return torch.cat([run(row.clone()) for row in x.split(1)])
