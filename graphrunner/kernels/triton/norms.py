"""RMSNorm over rows, for the batches whose products the library makes. Twin: reference.rms_norm."""

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
