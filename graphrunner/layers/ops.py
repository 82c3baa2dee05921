"""The fused ops that layers are written in; the one place that knows which device has which kernels.

Shape legend as in kernels/reference.py: T rows, K inputs, N outputs. The rows of a product lie one after the other.
Only the GPU's kernels rely on that; it is asked for on every device, so that a CPU shows who hands in something else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from graphrunner.kernels import reference, traced_ops
from graphrunner.kernels.batch_invariance import is_batch_invariant
from graphrunner.kernels.cpu import invariant_ops
from graphrunner.kernels.cpu import ops as cpu_ops
from graphrunner.kernels.packed_weight import Weight, WeightLayout, dequantize
from graphrunner.kernels.tracing import has_gpu_kernels, is_tracing

_STRIDED = "rows of a product must be contiguous"


@cache
def _gpu_kernels() -> ModuleType:
    from graphrunner.kernels.triton import gpu_ops, linear_config

    linear_config.load_overrides(linear_config.default_tuning_path())
    return gpu_ops


@cache
def _packed_kernels() -> ModuleType:
    from graphrunner.kernels.triton import quantized_linear

    return quantized_linear


@cache
def _invariant_gpu_kernels() -> ModuleType:
    from graphrunner.kernels.triton import invariant_linear

    return invariant_linear


def _invariant_kernels(x: Tensor) -> ModuleType:
    return _invariant_gpu_kernels() if x.is_cuda else invariant_ops


def _dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    return dequantize(weight).to(dtype)


def _on_cpu(x: Tensor, weight: Weight) -> bool:
    """Whether the CPU's own kernels read this weight."""
    return x.device.type == "cpu" and weight.layout in (WeightLayout.DENSE, WeightLayout.INT8)


def embedding(input_ids: Tensor, table: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Rows of the table [V, K] times scale. int [T] -> [T, K] of `dtype`, memory of its own."""
    if has_gpu_kernels(table) and table.dtype is dtype:
        return _gpu_kernels().embedding(input_ids, table, scale)
    rows = torch.nn.functional.embedding(input_ids, table).to(dtype)
    return rows if scale == 1.0 else rows * scale


def embed_beside(
    input_ids: Tensor,
    table: Tensor,
    scale: float,
    hidden: Tensor,
    norms: tuple[tuple[Tensor, float], tuple[Tensor, float]],
    *,
    has_normed: bool,
) -> tuple[Tensor, Tensor | None]:
    """Embeddings of int [T] and hidden rows [T, K], each normed (weight, eps), side by side: [T, 2K].

    Args:
        has_normed: return the normed hidden rows by themselves, too.
    """
    if has_gpu_kernels(table) and table.dtype is hidden.dtype and hidden.is_contiguous():
        kernels = _gpu_kernels()
        own, other = (kernels.Norm(weight, eps) for weight, eps in norms)
        return kernels.embed_beside(input_ids, table, scale, hidden, (own, other), has_normed=has_normed)
    normed = norm(hidden, *norms[1])
    embedded = norm(embedding(input_ids, table, scale, hidden.dtype), *norms[0])
    return torch.cat((embedded, normed), -1), normed if has_normed else None


def _is_compiled(x: Tensor) -> bool:
    """Whether operators stand in for the GPU's kernels. The CPU's kernels are operators themselves."""
    return x.is_cuda and is_tracing()


def norm_linear(x: Tensor, norm_weight: Tensor | None, eps: float, weight: Weight, bias: Tensor | None) -> Tensor:
    """rms_norm(x) @ weight.T + bias; no norm when norm_weight is None. [T, K] -> [T, N], dtype of x."""
    assert x.is_contiguous(), _STRIDED
    if is_batch_invariant():
        return _invariant_kernels(x).norm_linear(x, norm_weight, eps, weight, bias)
    if _is_compiled(x):
        return traced_ops.norm_linear(x, norm_weight, eps, weight, bias)
    if _on_cpu(x, weight):
        return cpu_ops.norm_linear(x, norm_weight, eps, weight.data, bias, weight.scale)
    if x.is_cuda and weight.is_dense:
        return _gpu_kernels().norm_linear(x, norm_weight, eps, weight.data, bias)
    if x.is_cuda:
        return _packed_kernels().norm_linear(x, norm_weight, eps, weight, bias)
    return reference.norm_linear(x, norm_weight, eps, _dense(weight, x.dtype), bias)


def norm_linear_argmax(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Weight, token_ids: Tensor | None = None
) -> Tensor | None:
    """The index of each row's largest output, int32 [T]; None where no kernel finds it while it multiplies.

    Args:
        token_ids: int32 [N]; what stands for each index in the result.
    """
    assert x.is_contiguous(), _STRIDED
    if not has_gpu_kernels(x) or is_batch_invariant():
        return None
    reduce_argmax = _gpu_kernels().reduce_argmax
    if weight.is_dense:
        return reduce_argmax(_gpu_kernels().norm_linear_argmax(x, norm_weight, eps, weight.data)[1], token_ids)
    return reduce_argmax(_packed_kernels().norm_linear_argmax(x, norm_weight, eps, weight)[1], token_ids)


def norm_gate_up(x: Tensor, norm_weight: Tensor | None, eps: float, gate_up_weight: Weight, activation: str) -> Tensor:
    """act(gate) * up of rms_norm(x); rows of the weight [2N, K] are [gate; up]. [T, K] -> [T, N]."""
    assert x.is_contiguous(), _STRIDED
    if is_batch_invariant():
        return _invariant_kernels(x).norm_gate_up(x, norm_weight, eps, gate_up_weight, activation)
    if _is_compiled(x):
        return traced_ops.norm_gate_up(x, norm_weight, eps, gate_up_weight, activation)
    if _on_cpu(x, gate_up_weight):
        return cpu_ops.norm_gate_up(x, norm_weight, eps, gate_up_weight.data, activation, gate_up_weight.scale)
    if x.is_cuda and gate_up_weight.is_dense:
        return _gpu_kernels().norm_gate_up(x, norm_weight, eps, gate_up_weight.data, activation)
    if x.is_cuda:
        return _packed_kernels().norm_gate_up(x, norm_weight, eps, gate_up_weight, activation)
    return reference.norm_gate_up(x, norm_weight, eps, _dense(gate_up_weight, x.dtype), activation)


def linear_residual(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual + x @ weight.T + bias. [T, K], [T, N] -> [T, N]. May write into `residual`: use only the result."""
    assert x.is_contiguous() and residual.is_contiguous(), _STRIDED
    if is_batch_invariant():
        return _invariant_kernels(x).linear_residual(x, weight, bias, residual)
    if _is_compiled(x):
        return traced_ops.linear_residual(x, weight, bias, residual)
    if _on_cpu(x, weight):
        return cpu_ops.linear_residual(x, weight.data, bias, residual, weight.scale)
    if x.is_cuda and weight.is_dense:
        return _gpu_kernels().linear_residual(x, weight.data, bias, residual)
    if x.is_cuda:
        return _packed_kernels().linear_residual(x, weight, bias, residual)
    return reference.linear_residual(x, _dense(weight, x.dtype), bias, residual)


def norm_residual(x: Tensor, norm_weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    """residual + rms_norm(x), both [T, K]. May write into `residual`: use only the result."""
    if x.device.type == "cpu":
        return cpu_ops.rms_norm(x, norm_weight, eps).add_(residual)
    if has_gpu_kernels(x):
        return _gpu_kernels().rms_norm(x, norm_weight, eps).add_(residual)
    return residual + reference.rms_norm(x, norm_weight, eps)


def norm(x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x), memory of its own. [T, K] -> [T, K]."""
    if x.device.type == "cpu":
        return cpu_ops.rms_norm(x, norm_weight, eps)
    if has_gpu_kernels(x):
        return _gpu_kernels().rms_norm(x, norm_weight, eps)
    return reference.rms_norm(x, norm_weight, eps)


def gate_mul(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up where the projection had a bias and could not be fused. [T, 2N] -> [T, N]."""
    if has_gpu_kernels(gate_up):
        return _gpu_kernels().gate_mul(gate_up, activation != "silu")
    gate, up = gate_up.chunk(2, dim=-1)
    functional = torch.nn.functional
    act = functional.silu if activation == "silu" else lambda x: functional.gelu(x, approximate="tanh")
    return _each(act, gate) * up


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), same shape and dtype."""
    return cap * _each(torch.tanh, logits / cap)


def _each(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return invariant_ops.elementwise(function, x) if is_batch_invariant() and not x.is_cuda else function(x)
