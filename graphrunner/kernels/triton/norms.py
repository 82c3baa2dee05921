"""RMSNorm over rows, for the batches whose products the library makes. Twin: reference.rms_norm."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from graphrunner.kernels.triton import runtime


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, K, eps, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program; with a residual, the sum is written back to it first.

    It lets its successor start before its own wait, unlike the others (linear_kernels, Note [trigger after wait]): the
    programs of a norm are few and all at work at once, and a projection that follows can ask for its weights while the
    kernel before the norm still runs. So a successor may read only what no kernel writes before its own wait.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    is_real = k < K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    weight = tl.full([BLOCK], 1.0, tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + k, mask=is_real, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * K + k, mask=is_real, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * K + k, mask=is_real, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * K + k, rounded, mask=is_real)
        x = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
    tl.store(out_ptr + row * K + k, (x * factor * weight).to(out_ptr.dtype.element_ty), mask=is_real)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, out: Tensor) -> None:
    width = x.shape[-1]
    num_rows = x.numel() // width
    if num_rows == 0:
        return
    block = runtime.next_power_of_2(width)
    pdl = runtime.use_dependent_launch(x.device)
    runtime.launch(
        _rms_norm_kernel,
        (num_rows,),
        x,
        residual if residual is not None else x,
        weight if weight is not None else x,
        out,
        width,
        eps,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        PDL=pdl,
        num_warps=min(16, max(1, block // 512)),
        launch_pdl=pdl,
    )


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Divide each row by its root mean square, in float32.

    Args:
        x: float [..., K], contiguous, device.
        weight: float32 [K], or None for a norm without a learned scale.
        eps: added to the mean square.

    Returns:
        Same dtype and shape as x. In graph: yes. Sync: none.
    """
    x = x.contiguous()
    out = x.new_empty(x.shape)
    _launch(x, None, weight, eps, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Add x to the residual stream in place, then normalise the sum.

    Args:
        x: float [T, K], contiguous, device.
        residual: float [T, K], contiguous; becomes residual + x, rounded to its dtype.
        weight: float32 [K] or None.
        eps: added to the mean square.

    Returns:
        rms_norm(residual), dtype of x. In graph: yes. Sync: none.
    """
    assert x.is_contiguous() and residual.is_contiguous()
    out = x.new_empty(x.shape)
    _launch(x, residual, weight, eps, out)
    return out


@dataclass(frozen=True, slots=True)
class Norm:
    """A learned norm: weight float32 [K], device; eps is added to the mean square."""

    weight: Tensor
    eps: float


@triton.jit
def _embed_beside_kernel(
    ids_ptr, table_ptr, hidden_ptr, embed_weight_ptr, hidden_weight_ptr, out_ptr, normed_ptr, V, K, scale, embed_eps,
    hidden_eps, BLOCK: tl.constexpr, HAS_NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    is_real = k < K
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.load(ids_ptr + row).to(tl.int64)
    # An index out of range (a poisoned pad row) reads row 0 instead of memory nobody owns.
    index = tl.where((index >= 0) & (index < V), index, 0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(table_ptr + index * K + k, mask=is_real, other=0.0).to(tl.float32) * scale
    x = x.to(dtype).to(tl.float32)
    y = tl.load(hidden_ptr + row * K + k, mask=is_real, other=0.0).to(tl.float32)
    embed_weight = tl.load(embed_weight_ptr + k, mask=is_real, other=0.0).to(tl.float32)
    hidden_weight = tl.load(hidden_weight_ptr + k, mask=is_real, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / K + embed_eps) * embed_weight
    y = y * tl.rsqrt(tl.sum(y * y, 0) / K + hidden_eps) * hidden_weight
    tl.store(out_ptr + row * 2 * K + k, x.to(dtype), mask=is_real)
    tl.store(out_ptr + row * 2 * K + K + k, y.to(dtype), mask=is_real)
    if HAS_NORMED:
        tl.store(normed_ptr + row * K + k, y.to(dtype), mask=is_real)


def embed_beside(
    input_ids: Tensor, table: Tensor, scale: float, hidden: Tensor, norms: tuple[Norm, Norm], *, has_normed: bool
) -> tuple[Tensor, Tensor | None]:
    """Embeddings and hidden rows, each normed, side by side.

    Args:
        input_ids: int [T], device; values out of range read row 0.
        table: float [V, K], contiguous; scale multiplies its rows.
        hidden: [T, K], contiguous, dtype of table.
        norms: of embeddings and of hidden rows.
        has_normed: whether the normed hidden rows are wanted by themselves, too.

    Returns:
        [T, 2K], and [T, K] or None. In graph: yes. Sync: none.
    """
    num_rows, width = hidden.shape
    assert hidden.is_contiguous() and table.shape[1] == width and table.dtype is hidden.dtype
    out, block = hidden.new_empty(num_rows, 2 * width), runtime.next_power_of_2(width)
    normed = hidden.new_empty(num_rows, width) if has_normed else None
    if num_rows == 0:
        return out, normed
    pdl = runtime.use_dependent_launch(hidden.device)
    runtime.launch(
        _embed_beside_kernel, (num_rows,),
        input_ids, table, hidden, norms[0].weight, norms[1].weight, out, out if normed is None else normed,
        table.shape[0], width, scale, norms[0].eps, norms[1].eps, BLOCK=block, HAS_NORMED=has_normed, PDL=pdl,
        num_warps=min(16, max(1, block // 256)), launch_pdl=pdl,
    )  # fmt: skip
    return out, normed
