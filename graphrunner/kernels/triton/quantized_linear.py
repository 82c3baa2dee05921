"""Launchers of projections by packed weights. Twins: kernels/reference.py over kernels/packed_weight.dequantize.

One row runs on CUDA cores, a few on tensor cores with the norm fused in, a few hundred in 2-D tiles. Above, the
arithmetic is the limit: the weight is widened slab by slab for the library's product. An fp8 weight with a scale per
row goes to the library as soon as the rows do not fit the fused kernels, and multiplies rows rounded to fp8.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphrunner.kernels.packed_weight import Weight, WeightLayout
from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.activation import gate_mul
from graphrunner.kernels.triton.linear_config import LinearMode
from graphrunner.kernels.triton.norms import rms_norm
from graphrunner.kernels.triton.quantized_config import (
    PackedConfig,
    PackedKind,
    select_packed_config,
)
from graphrunner.kernels.triton.quantized_kernels import (
    dequantize_kernel,
    finish_kernel,
    packed_sliced_kernel,
    packed_tile_kernel,
    packed_vector_kernel,
    rows_to_fp8_kernel,
)
from graphrunner.kernels.triton.sample import ArgmaxPartials, argmax_partials

_LAYOUTS = {WeightLayout.INT8: 0, WeightLayout.INT4: 1, WeightLayout.FP8: 2}
_FP8_BITS = 3
_SLAB_BYTES = 64 << 20  # of widened weights at a time: bounds what a product in a graph needs beside its result
_BLOCK = 1024
GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class PackedCall:
    """Operands of one projection, as decode_linear.LinearCall with a packed weight."""

    mode: LinearMode
    x: Tensor
    norm_weight: Tensor | None
    eps: float
    weight: Weight
    bias: Tensor | None
    residual: Tensor | None
    out: Tensor
    is_gelu: bool = False

    @property
    def num_outputs(self) -> int:
        """N, of one half when gated."""
        return self.weight.shape[0] // (2 if self.mode is LinearMode.GATED else 1)


def prepare_packed(call: PackedCall, config: PackedConfig, device: torch.device) -> runtime.Launch:
    """The launch of a VECTOR or SLICED kernel on `device`; operands may be meta tensors, to compile ahead."""
    weight, num_rows = call.weight, call.x.shape[0]
    assert config.kind in (PackedKind.VECTOR, PackedKind.SLICED)
    assert call.x.is_contiguous() and call.out.is_contiguous() and all(one.is_contiguous() for one in weight.tensors)
    pdl = runtime.use_dependent_launch(device)
    unread = call.out  # a pointer for the operands this call does not read
    data, layout = _readable(weight, device)
    packed = (data, weight.scale, unread if weight.zero is None else weight.zero)
    around = (unread if call.bias is None else call.bias, unread if call.residual is None else call.residual, call.out)
    settings = {
        "K": weight.shape[1],
        "BLOCK_N": config.block_n,
        "GROUP": weight.group_size,
        "ROW_BLOCK": weight.row_block,
        "LAYOUT": layout,
        "MODE": int(call.mode),
        "IS_GELU": call.is_gelu,
        "HAS_BIAS": call.bias is not None,
        "PDL": pdl,
        "num_warps": config.num_warps,
        "launch_pdl": pdl,
    }
    num_tiles = runtime.cdiv(call.num_outputs, config.block_n)
    norm = unread if call.norm_weight is None else call.norm_weight
    operands = (call.x, norm, *packed, *around, call.num_outputs, call.eps)
    settings |= {"HAS_NORM": call.norm_weight is not None}
    if config.kind is PackedKind.VECTOR:
        settings |= {"ROWS": num_rows, "COLS": config.block_k}
        return runtime.Launch(packed_vector_kernel, (num_tiles,), operands, settings)
    block_b = max(8, runtime.next_power_of_2(num_rows))
    settings |= {"BLOCK_B": block_b, "J": config.block_k, "SLICES": config.slices, "STAGES": config.num_stages}
    return runtime.Launch(packed_sliced_kernel, (num_tiles,), (*operands, num_rows), settings)


def prepare_tiles(call: PackedCall, config: PackedConfig, device: torch.device) -> list[runtime.Launch]:
    """The launches of a TILE product, which has no norm: tiles, and a join where K is in pieces or rows are gated."""
    weight, num_rows = call.weight, call.x.shape[0]
    assert config.kind is PackedKind.TILE and call.norm_weight is None, "tiles have no norm"
    assert call.x.is_contiguous() and call.out.is_contiguous() and all(one.is_contiguous() for one in weight.tensors)
    pdl = runtime.use_dependent_launch(device)
    is_partial = config.slices > 1 or call.mode is LinearMode.GATED
    num_columns = weight.shape[0]
    out = call.out
    if is_partial:
        out = torch.empty(config.slices, num_rows, num_columns, dtype=torch.float32, device=call.x.device)
    data, layout = _readable(weight, device)
    bias = call.out if call.bias is None else call.bias
    residual = call.out if call.residual is None else call.residual
    zero = call.out if weight.zero is None else weight.zero
    shared = {
        "GROUP": weight.group_size, "MODE": int(call.mode), "HAS_BIAS": call.bias is not None, "SPLITS": config.slices,
        "PDL": pdl, "launch_pdl": pdl,
    }  # fmt: skip
    tiles = {
        "K": weight.shape[1], "BLOCK_B": config.block_b, "BLOCK_N": config.block_n, "J": config.block_k,
        "STAGES": config.num_stages, "ROW_BLOCK": weight.row_block, "LAYOUT": layout, "IS_PARTIAL": is_partial,
        "num_warps": config.num_warps,
    }  # fmt: skip
    grid = (runtime.cdiv(num_rows, config.block_b), runtime.cdiv(num_columns, config.block_n), config.slices)
    operands = (call.x, data, weight.scale, zero, bias, residual, out, num_columns, num_rows)
    launches = [runtime.Launch(packed_tile_kernel, grid, operands, shared | tiles)]
    if is_partial:
        joined = {"BLOCK": _BLOCK, "IS_GELU": call.is_gelu, "num_warps": 4}
        operands = (out, weight.scale, bias, residual, call.out, call.num_outputs, num_rows)
        grid = (num_rows, runtime.cdiv(call.num_outputs, _BLOCK))
        launches.append(runtime.Launch(finish_kernel, grid, operands, shared | joined))
    return launches


def prepare(call: PackedCall, config: PackedConfig, device: torch.device) -> list[runtime.Launch]:
    """The launches of one product; config.kind is not WIDEN."""
    if config.kind is PackedKind.TILE:
        return prepare_tiles(call, config, device)
    return [prepare_packed(call, config, device)]


def norm_linear(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Weight, bias: Tensor | None = None
) -> Tensor:
    """rms_norm(x) @ weight.T + bias.

    Args:
        x: float [T, K], device.
        norm_weight: float32 [K]; None means no normalisation at all.
        eps: added to the mean square.
        weight: packed [N, K].
        bias: float [N] or None.

    Returns:
        [T, N], dtype of x.

    In graph: yes. Sync: none.
    """
    out = x.new_empty(x.shape[0], weight.shape[0])
    call = PackedCall(LinearMode.PLAIN, x, norm_weight, eps, weight, bias, None, out)
    if _run(call):
        return out
    return _library_linear(call, out)


def norm_gate_up(x: Tensor, norm_weight: Tensor | None, eps: float, weight: Weight, activation: str) -> Tensor:
    """act(gate) * up of rms_norm(x); the first half of the weight's rows [2N, K] is the gate. [T, K] -> [T, N].

    In graph: yes. Sync: none.
    """
    is_gelu = activation == GELU_TANH
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    call = PackedCall(LinearMode.GATED, x, norm_weight, eps, weight, None, None, out, is_gelu)
    if _run(call):
        return out
    both = x.new_empty(x.shape[0], weight.shape[0])
    return gate_mul(_library_linear(call, both), is_gelu)


def linear_residual(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual += x @ weight.T + bias, in place. [T, K], [T, N] -> residual.

    In graph: yes. Sync: none. Aliasing: the result is residual itself.
    """
    call = PackedCall(LinearMode.RESIDUAL, x, None, 0.0, weight, bias, residual, residual)
    if _run(call):
        return residual
    return residual.add_(_library_linear(call, torch.empty_like(residual)))


def norm_linear_argmax(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Weight
) -> tuple[Tensor, ArgmaxPartials]:
    """As decode_linear.norm_linear_argmax: logits [B, V], and the best (value, index) of each slice of them."""
    logits = norm_linear(x, norm_weight, eps, weight)
    return logits, argmax_partials(logits)


def _run(call: PackedCall) -> bool:
    """Run our own kernels if they serve the shape; False leaves it to the library."""
    x = call.x
    num_rows = x.shape[0]
    config = select_packed_config(call.weight, num_rows, x.dtype, call.mode is LinearMode.GATED)
    is_tiled = config.kind is PackedKind.TILE
    if config.kind is PackedKind.WIDEN or (is_tiled and _has_fp8_product(x, call.weight)):
        return False
    # A float16 row times the norm weight could overflow before the norm's factor is applied.
    if call.norm_weight is not None and (is_tiled or x.dtype is torch.float16):
        call = replace(call, x=rms_norm(x, call.norm_weight, call.eps), norm_weight=None)
    for launch in prepare(call, config, x.device):
        launch.run()
    return True


def _readable(weight: Weight, device: torch.device) -> tuple[Tensor, int]:
    """The data and the kernels' number for its layout; fp8 as bits where the card cannot convert it."""
    if weight.layout is WeightLayout.FP8 and not runtime.has_fp8(device):
        return weight.data.view(torch.uint8), _FP8_BITS
    return weight.data, _LAYOUTS[weight.layout]


def _library_linear(call: PackedCall, out: Tensor) -> Tensor:
    """rms_norm(x) @ weight.T + bias by the vendor's products, into out [T, N]; the mode is the caller's."""
    x, weight = call.x, call.weight
    if _has_fp8_product(x, weight):
        rows, scale = rows_to_fp8(x, call.norm_weight, call.eps)
        assert weight.scale is not None
        product = torch._scaled_mm(
            rows, weight.data.t(), scale_a=scale, scale_b=weight.scale.t(), bias=call.bias, out_dtype=x.dtype
        )
        return out.copy_(product)
    if call.norm_weight is not None:
        x = rms_norm(x, call.norm_weight, call.eps)
    num_rows, width = weight.shape
    step = max(1, _SLAB_BYTES // (width * x.dtype.itemsize) // weight.row_block) * weight.row_block
    for start in range(0, num_rows, step):
        rows_of_slab = slice(start, min(start + step, num_rows))
        torch.mm(x, widen_rows(weight, rows_of_slab, x.dtype).t(), out=out[:, rows_of_slab])
    return out if call.bias is None else out.add_(call.bias)


def _has_fp8_product(x: Tensor, weight: Weight) -> bool:
    """Whether the library multiplies fp8 by fp8 with a scale per row on this card, for these shapes."""
    is_row_scaled = weight.layout is WeightLayout.FP8 and weight.group_size == 0 and weight.row_block == 1
    fits = weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0
    return is_row_scaled and fits and x.dtype is torch.bfloat16 and runtime.has_fp8_products(x.device)


def rows_to_fp8(x: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Normalise rows and round them to e4m3: [T, K] -> float8_e4m3fn [T, K], and float32 [T, 1] to multiply them by."""
    num_rows, width = x.shape
    out = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    pdl = runtime.use_dependent_launch(x.device)
    block = runtime.next_power_of_2(width)
    runtime.launch(
        rows_to_fp8_kernel, (num_rows,),
        x, x if norm_weight is None else norm_weight, out, scale, width, eps, BLOCK=block,
        HAS_NORM=norm_weight is not None, PDL=pdl, num_warps=min(16, max(1, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return out, scale


def widen_rows(weight: Weight, rows: slice, dtype: torch.dtype) -> Tensor:
    """Rows of a packed weight as `dtype` [count, K]. In graph: yes. Twin: packed_weight.dequantize."""
    assert weight.scale is not None
    assert rows.start % weight.row_block == 0, f"row {rows.start} is inside a block of {weight.row_block}"
    data, layout = _readable(weight, weight.data.device)
    data = data[rows]
    out = torch.empty(data.shape[0], weight.shape[1], dtype=dtype, device=data.device)
    scale = weight.scale[rows.start // weight.row_block :]
    zero = out if weight.zero is None else weight.zero[rows]
    pdl = runtime.use_dependent_launch(data.device)
    runtime.launch(
        dequantize_kernel, (data.shape[0], runtime.cdiv(data.shape[1], _BLOCK)),
        data, scale, zero, out, K=weight.shape[1], BLOCK=_BLOCK, GROUP=weight.group_size, ROW_BLOCK=weight.row_block,
        LAYOUT=layout, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
