"""Launchers of the small-batch projections (1 to 256 rows), and their form around the library's product.

Twins: norm_linear, norm_gate_up, linear_residual of kernels/reference.py.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.activation import gate_mul
from graphrunner.kernels.triton.linear_call import LinearCall
from graphrunner.kernels.triton.linear_config import (
    LinearConfig,
    LinearKind,
    LinearMode,
    LinearShape,
    select_config,
)
from graphrunner.kernels.triton.linear_kernels import (
    mma_linear_kernel,
    vector_linear_kernel,
)
from graphrunner.kernels.triton.norms import rms_norm
from graphrunner.kernels.triton.sample import ArgmaxPartials, argmax_partials
from graphrunner.kernels.triton.skinny_linear import prepare_skinny

GELU_TANH = "gelu_tanh"


def num_programs(config: LinearConfig, shape: LinearShape, device: torch.device) -> int:
    """Grid size of a launch; also the number of argmax partials a row gets."""
    num_tiles = runtime.cdiv(shape.num_outputs, config.block_n)
    if config.kind is LinearKind.VECTOR:
        return min(num_tiles, config.programs_per_multiprocessor * runtime.num_multiprocessors(device))
    return num_tiles


def prepare_linear(
    call: LinearCall, config: LinearConfig, device: torch.device, partials: ArgmaxPartials | None = None
) -> runtime.Launch:
    """The launch of one kernel; config.kind is not LIBRARY.

    Args:
        call: operands; meta tensors do for compiling. SKINNY takes x already normalised unless it fuses_norm.
        config: which kernel, with which tiles.
        device: where it will run.
        partials: written by ARGMAX.
    """
    if config.kind is LinearKind.SKINNY:
        return prepare_skinny(call, config, device, partials)
    num_rows, width = call.x.shape
    assert call.x.is_contiguous() and call.weight.is_contiguous() and call.out.is_contiguous()
    unread = call.out  # a pointer for the operands this mode does not read
    pdl = runtime.use_dependent_launch(device)
    operands = (
        call.x,
        call.norm_weight if call.norm_weight is not None else unread,
        call.weight,
        call.bias if call.bias is not None else unread,
        call.residual if call.residual is not None else unread,
        call.out,
        partials.values if partials is not None else unread,
        partials.indices if partials is not None else unread,
        call.shape.num_outputs,
        call.eps,
    )
    settings = {
        "K": width,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
        "MODE": int(call.mode),
        "IS_GELU": call.is_gelu,
        "HAS_NORM": call.norm_weight is not None,
        "HAS_BIAS": call.bias is not None,
        "TRIGGER": config.trigger,
        "PDL": pdl,
        "num_warps": config.num_warps,
        "launch_pdl": pdl,
    }
    grid = (num_programs(config, call.shape, device),)
    if config.kind is LinearKind.VECTOR:
        return runtime.Launch(vector_linear_kernel, grid, operands, settings | {"ROWS": num_rows})
    settings |= {"BLOCK_B": max(8, runtime.next_power_of_2(num_rows)), "SLICES": config.slices}
    return runtime.Launch(mma_linear_kernel, grid, (*operands, num_rows), settings)


def launch_linear(call: LinearCall, config: LinearConfig, partials: ArgmaxPartials | None = None) -> None:
    """Run one kernel; config.kind is not LIBRARY.

    In graph: yes. Sync: none. Aliasing: call.out may be call.residual.
    """
    if config.kind is LinearKind.SKINNY and call.norm_weight is not None and not config.fuses_norm:
        call = replace(call, x=rms_norm(call.x, call.norm_weight, call.eps), norm_weight=None)
    prepare_linear(call, config, call.x.device, partials).run()


def _config(call: LinearCall) -> LinearConfig:
    return select_config(call.shape, call.x.shape[0], call.x.dtype, call.x.device)


def norm_linear(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Project the normalised rows: rms_norm(x) @ weight.T + bias.

    Args:
        x: float [T, K], device.
        norm_weight: float32 [K]; None means no normalisation at all.
        eps: added to the mean square.
        weight: float [N, K], dtype of x.
        bias: float [N] or None.

    Returns:
        [T, N], dtype of x.

    In graph: yes. Sync: none.
    """
    out = x.new_empty(x.shape[0], weight.shape[0])
    call = LinearCall(LinearMode.PLAIN, x, norm_weight, eps, weight, bias, None, out)
    config = _config(call)
    if config.kind is LinearKind.LIBRARY:
        return F.linear(x if norm_weight is None else rms_norm(x, norm_weight, eps), weight, bias)
    launch_linear(call, config)
    return out


def norm_gate_up(x: Tensor, norm_weight: Tensor | None, eps: float, gate_up_weight: Tensor, activation: str) -> Tensor:
    """First half of a gated MLP: act(gate) * up of the normalised rows.

    Args:
        x: float [T, K], device.
        norm_weight: float32 [K]; None means no normalisation at all.
        eps: added to the mean square.
        gate_up_weight: float [2N, K]; the first N rows are the gate.
        activation: "silu" or "gelu_tanh".

    Returns:
        [T, N], dtype of x.

    In graph: yes. Sync: none.
    """
    is_gelu = activation == GELU_TANH
    out = x.new_empty(x.shape[0], gate_up_weight.shape[0] // 2)
    call = LinearCall(LinearMode.GATED, x, norm_weight, eps, gate_up_weight, None, None, out, is_gelu)
    config = _config(call)
    if config.kind is LinearKind.LIBRARY:
        hidden = x if norm_weight is None else rms_norm(x, norm_weight, eps)
        return gate_mul(F.linear(hidden, gate_up_weight), is_gelu)
    launch_linear(call, config)
    return out


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Project and add the residual stream, in place: residual += x @ weight.T + bias.

    Args:
        x: float [T, K], device.
        weight: float [N, K], dtype of x.
        bias: float [N] or None.
        residual: float [T, N], contiguous; written.

    Returns:
        residual.

    In graph: yes. Sync: none. Aliasing: the result is residual itself.
    """
    call = LinearCall(LinearMode.RESIDUAL, x, None, 0.0, weight, bias, residual, residual)
    config = _config(call)
    if config.kind is LinearKind.LIBRARY:
        # The product accumulates onto the residual in float32 and rounds once.
        residual.addmm_(x, weight.t())
        return residual if bias is None else residual.add_(bias)
    launch_linear(call, config)
    return residual


def norm_linear_argmax(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor
) -> tuple[Tensor, ArgmaxPartials]:
    """Logits, and the best (value, index) of each slice of the vocabulary.

    Args:
        x: float [B, K], device.
        norm_weight: float32 [K]; None means no normalisation at all.
        eps: added to the mean square.
        weight: float [V, K], dtype of x.

    Returns:
        Logits [B, V] of x's dtype, and partials whose maximum is the greedy token (see sample.reduce_argmax).

    In graph: yes. Sync: none.
    """
    out = x.new_empty(x.shape[0], weight.shape[0])
    call = LinearCall(LinearMode.ARGMAX, x, norm_weight, eps, weight, None, None, out)
    config = _config(call)
    if config.kind is LinearKind.LIBRARY:
        logits = F.linear(x if norm_weight is None else rms_norm(x, norm_weight, eps), weight)
        return logits, argmax_partials(logits)
    num_partials = num_programs(config, call.shape, x.device)
    partials = ArgmaxPartials(
        x.new_empty(x.shape[0], num_partials, dtype=torch.float32),
        x.new_empty(x.shape[0], num_partials, dtype=torch.int32),
    )
    launch_linear(call, config, partials)
    return out, partials
