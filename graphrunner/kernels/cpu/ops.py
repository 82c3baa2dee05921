"""The CPU's fused operations: the C++ kernel where it serves, else the plain torch twin.

The C++ kernels take float32 activations; weights are float32, bfloat16 (widened in registers) or int8 with scales. Up
to 16 rows a projection is one walk over the weight at memory speed; above, the library's GEMM does it. Every operator
is registered with torch and has a shape function, so torch.compile and torch.export keep it as one opaque node.

Shape legend as in kernels/reference.py.
"""

import torch
from torch import Tensor

from graphrunner.kernels import reference
from graphrunner.kernels.cpu.build import load_library

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def is_available() -> bool:
    """Whether the C++ kernels can be used here; builds them at the first call on this machine."""
    return load_library() and _register_shape_functions()


# What torch.compiler.assume_constant_result does, without the second that importing torch's compiler takes.
is_available._dynamo_marked_constant = True  # type: ignore[attr-defined]


def rms_norm(x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """Normalise rows. Args and result as reference.rms_norm."""
    if _is_served(x):
        return torch.ops.graphrunner.cpu_rms_norm.default(x, norm_weight, eps)
    return reference.rms_norm(x, norm_weight, eps)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """rms_norm(x) @ weight.T + bias.

    Args:
        x: float [T, K].
        norm_weight: float32 [K]; None means no normalisation at all.
        weight: float32, bfloat16 or int8 [N, K].
        bias: float32 [N] or None.
        scale: float32 [N] or [N, num_groups]; given exactly when weight is int8.

    Returns:
        [T, N], dtype of x.
    """
    if _is_served(x):
        return torch.ops.graphrunner.cpu_linear.default(x, norm_weight, eps, weight, scale, bias, None)
    return reference.norm_linear(x, norm_weight, eps, _dense(weight, scale), bias)


def norm_gate_up(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    gate_up_weight: Tensor,
    activation: str,
    scale: Tensor | None = None,
) -> Tensor:
    """act(gate) * up of the normalised rows; weight rows are [gate; up].

    Args:
        x: float [T, K].
        norm_weight: float32 [K]; None means no normalisation at all.
        gate_up_weight: float32, bfloat16 or int8 [2N, K].
        activation: "silu" or "gelu_tanh".
        scale: float32 [2N] or [2N, num_groups]; given exactly when the weight is int8.

    Returns:
        [T, N], dtype of x.
    """
    if _is_served(x):
        kind = _ACTIVATIONS[activation]
        return torch.ops.graphrunner.cpu_gate_up.default(x, norm_weight, eps, gate_up_weight, scale, kind)
    return reference.norm_gate_up(x, norm_weight, eps, _dense(gate_up_weight, scale), activation)


def linear_residual(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, scale: Tensor | None = None
) -> Tensor:
    """residual + x @ weight.T + bias. Args as norm_linear, residual: float [T, N], left as it is."""
    if _is_served(x) and residual.dtype == torch.float32:
        return torch.ops.graphrunner.cpu_linear.default(x, None, 0.0, weight, scale, bias, residual)
    return reference.linear_residual(x, _dense(weight, scale), bias, residual)


def rope_store_attention(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    norm_eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    request_rows: Tensor,
    page_table: Tensor,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Normalise and rotate q and k, store k and v, attend. Args and result as reference.rope_store_attention.

    The kernel's cache is float32 or bfloat16, the twin's any; page_table may be a view whose rows are contiguous.
    Cost: reads the keys a request can see, whatever the width of the page table.
    """
    arguments = (
        qkv, cos, sin, q_norm_weight, k_norm_weight, norm_eps, k_cache, v_cache, positions, slot_mapping,
        query_start_loc, seq_lens, request_rows, page_table, scale, sliding_window, soft_cap,
    )  # fmt: skip
    if _is_served(qkv) and k_cache.dtype in (torch.float32, torch.bfloat16):
        return torch.ops.graphrunner.cpu_rope_store_attention.default(*arguments)
    return reference.rope_store_attention(*arguments, k_scale, v_scale)


def argmax(logits: Tensor) -> Tensor:
    """Greedy token of each row, the first of equals: float [T, V] -> int64 [T]."""
    if _is_served(logits):
        return torch.ops.graphrunner.cpu_argmax.default(logits)
    return logits.argmax(-1)


def _is_served(x: Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32 and (_has_shape_functions or is_available())


def _dense(weight: Tensor, scale: Tensor | None) -> Tensor:
    return weight if scale is None else reference.dequantize_int8(weight, scale)


_has_shape_functions = False


def _register_shape_functions() -> bool:
    """Tell torch the result shapes, once; always True."""
    global _has_shape_functions  # noqa: PLW0603 - a plain flag costs the hot path nothing and stays traceable
    if _has_shape_functions:
        return True
    _has_shape_functions = True

    @torch.library.register_fake("graphrunner::cpu_linear")
    def _linear(x, norm_weight, eps, weight, scale, bias, residual):  # type: ignore[no-untyped-def]
        return x.new_empty(x.shape[0], weight.shape[0])

    @torch.library.register_fake("graphrunner::cpu_gate_up")
    def _gate_up(x, norm_weight, eps, weight, scale, activation):  # type: ignore[no-untyped-def]
        return x.new_empty(x.shape[0], weight.shape[0] // 2)

    @torch.library.register_fake("graphrunner::cpu_rms_norm")
    def _rms_norm(x, norm_weight, eps):  # type: ignore[no-untyped-def]
        return torch.empty_like(x)

    @torch.library.register_fake("graphrunner::cpu_argmax")
    def _argmax(logits):  # type: ignore[no-untyped-def]
        return logits.new_empty(logits.shape[0], dtype=torch.int64)

    @torch.library.register_fake("graphrunner::cpu_rope_store_attention")
    def _rope_store_attention(qkv, cos, sin, q_norm, k_norm, norm_eps, k_cache, *rest):  # type: ignore[no-untyped-def]
        head_width = k_cache.shape[2] * k_cache.shape[3]
        return qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * head_width)

    return True
