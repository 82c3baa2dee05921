"""Gated activations and the embedding lookup, for the batches whose products the library makes."""

import triton
import triton.language as tl
from torch import Tensor

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.linear_kernels import gated

_BLOCK = 1024


@triton.jit
def _gate_mul_kernel(gate_up_ptr, out_ptr, N, BLOCK: tl.constexpr, IS_GELU: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = n < N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_up_ptr + row * 2 * N + n, mask=is_real, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * N + N + n, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + n, gated(gate, up, IS_GELU).to(out_ptr.dtype.element_ty), mask=is_real)


def gate_mul(gate_up: Tensor, is_gelu: bool) -> Tensor:
    """act(gate) * up.

    Args:
        gate_up: float [T, 2N], contiguous, device; the first N columns are the gate.
        is_gelu: tanh GELU instead of SiLU.

    Returns:
        [T, N], dtype of gate_up. In graph: yes. Sync: none.
    """
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    if num_rows == 0:
        return out
    pdl = runtime.use_dependent_launch(gate_up.device)
    grid = (num_rows, runtime.cdiv(width, _BLOCK))
    runtime.launch(
        _gate_mul_kernel,
        grid,
        gate_up.contiguous(),
        out,
        width,
        BLOCK=_BLOCK,
        IS_GELU=is_gelu,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


@triton.jit
def _embedding_kernel(ids_ptr, table_ptr, out_ptr, V, K, scale, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = k < K
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.load(ids_ptr + token).to(tl.int64)
    # An index out of range (a poisoned pad row) reads row 0 instead of memory nobody owns.
    index = tl.where((index >= 0) & (index < V), index, 0)
    x = tl.load(table_ptr + index * K + k, mask=is_real, other=0.0).to(tl.float32) * scale
    tl.store(out_ptr + token * K + k, x.to(out_ptr.dtype.element_ty), mask=is_real)


def embedding(input_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """Rows of the embedding table.

    Args:
        input_ids: int [T], device; values out of range read row 0.
        table: float [V, K], contiguous.
        scale: multiplies every row, in float32 (Gemma's sqrt(K)).

    Returns:
        [T, K], dtype of table. In graph: yes. Sync: none.
    """
    num_tokens, width = input_ids.shape[0], table.shape[1]
    out = table.new_empty(num_tokens, width)
    if num_tokens == 0:
        return out
    pdl = runtime.use_dependent_launch(table.device)
    grid = (num_tokens, runtime.cdiv(width, _BLOCK))
    runtime.launch(
        _embedding_kernel,
        grid,
        input_ids,
        table,
        out,
        table.shape[0],
        width,
        scale,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
