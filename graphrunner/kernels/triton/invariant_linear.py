"""Projections with one launch configuration for every row count: the same bits for a row alone and in any batch.

The tiles, the splits of K and the order in which they are added follow from the weight alone (skinny_linear's kernel).
A row is one column of a tensor-core product, whose sums do not depend on the other columns.
Twins: norm_linear, norm_gate_up, linear_residual of kernels/reference.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphrunner.core.errors import ConfigError
from graphrunner.kernels.packed_weight import Weight
from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.decode_linear import GELU_TANH, prepare_linear
from graphrunner.kernels.triton.linear_call import LinearCall
from graphrunner.kernels.triton.linear_config import LinearConfig, LinearKind, LinearMode, LinearShape
from graphrunner.kernels.triton.norms import rms_norm

ROWS_PER_TILE = 64
_BLOCK_N = 64
_MIN_BLOCK_K = 16
_MAX_SPLITS = 8
_ROWS_PER_LAUNCH = 1024  # bounds the partial sums of a long prompt
_WANTED_PROGRAMS = 128  # a constant: a count of this card's multiprocessors would make bits differ between cards


def invariant_config(shape: LinearShape, dtype: torch.dtype) -> LinearConfig:
    """The one configuration of a weight.

    Raises:
        ConfigError: the kernel cannot walk K in whole tiles.
    """
    divisor = runtime.largest_power_of_two_divisor(shape.num_inputs)
    if divisor < _MIN_BLOCK_K:
        problem = f"needs hidden sizes that {_MIN_BLOCK_K} divides; this model has {shape.num_inputs}"
        raise ConfigError("deterministic", True, problem)
    num_tiles = -(-shape.num_outputs // _BLOCK_N)
    splits = 1
    while splits < _MAX_SPLITS and num_tiles * splits < _WANTED_PROGRAMS and divisor // (2 * splits) >= _MIN_BLOCK_K:
        splits *= 2
    widest = 128 if dtype.itemsize == 2 else 32
    block_k = min(divisor // splits, widest // (2 if shape.mode is LinearMode.GATED else 1))
    return LinearConfig(
        LinearKind.SKINNY, _BLOCK_N, max(block_k, _MIN_BLOCK_K), splits, num_warps=4, num_stages=3,
        block_b=ROWS_PER_TILE, has_fixed_rows=True,
    )  # fmt: skip


def norm_linear(x: Tensor, norm_weight: Tensor | None, eps: float, weight: Weight, bias: Tensor | None) -> Tensor:
    """As layers.ops.norm_linear. In graph: yes. Sync: none."""
    hidden = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    out = x.new_empty(x.shape[0], weight.shape[0])
    return _run(LinearMode.PLAIN, hidden, weight, bias, None, out)


def norm_gate_up(x: Tensor, norm_weight: Tensor | None, eps: float, gate_up_weight: Weight, activation: str) -> Tensor:
    """As layers.ops.norm_gate_up. In graph: yes. Sync: none."""
    hidden = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    out = x.new_empty(x.shape[0], gate_up_weight.shape[0] // 2)
    return _run(LinearMode.GATED, hidden, gate_up_weight, None, None, out, is_gelu=activation == GELU_TANH)


def linear_residual(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """As layers.ops.linear_residual; written into `residual`. In graph: yes. Sync: none."""
    return _run(LinearMode.RESIDUAL, x, weight, bias, residual, residual)


def _run(
    mode: LinearMode,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    is_gelu: bool = False,
) -> Tensor:
    if not weight.is_dense:
        raise ConfigError("deterministic", True, f"covers dense weights on a GPU, not {weight.layout.value}")
    for start in range(0, x.shape[0], _ROWS_PER_LAUNCH):
        rows = slice(start, start + _ROWS_PER_LAUNCH)
        added = None if residual is None else residual[rows]
        call = LinearCall(mode, x[rows], None, 0.0, weight.data, bias, added, out[rows], is_gelu)
        prepare_linear(call, invariant_config(call.shape, x.dtype), x.device).run()
    return out
