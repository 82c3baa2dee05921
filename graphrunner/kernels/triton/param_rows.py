"""The sampling parameters of a step's rows, from those of all requests, in one launch. Twin: indexing, one by one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.request_rows import REQUEST_BLOCK
from graphrunner.kernels.triton.sample import SamplingRows


@triton.jit(do_not_specialize=["num_rows"])
def _take_params_kernel(
    rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, out_temperature_ptr, out_top_k_ptr,
    out_top_p_ptr, out_min_p_ptr, out_seed_ptr, num_rows, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = i < num_rows
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(rows_ptr + i, mask=is_in, other=0).to(tl.int64)
    tl.store(out_temperature_ptr + i, tl.load(temperature_ptr + row, mask=is_in), mask=is_in)
    tl.store(out_top_k_ptr + i, tl.load(top_k_ptr + row, mask=is_in), mask=is_in)
    tl.store(out_top_p_ptr + i, tl.load(top_p_ptr + row, mask=is_in), mask=is_in)
    tl.store(out_min_p_ptr + i, tl.load(min_p_ptr + row, mask=is_in), mask=is_in)
    tl.store(out_seed_ptr + i, tl.load(seed_ptr + row, mask=is_in), mask=is_in)


def take_params(params: SamplingRows, rows: Tensor) -> SamplingRows:
    """`params` of `rows`, int [N], device. In graph: yes. Sync: none."""
    num_rows = rows.shape[0]
    if rows.dtype is not torch.int32:
        rows = rows.to(torch.int32)  # one compiled kernel for all
    taken = SamplingRows(
        *(
            torch.empty(num_rows, dtype=column.dtype, device=column.device)
            for column in (params.temperature, params.top_k, params.top_p, params.min_p, params.seed)
        )
    )
    if num_rows == 0:
        return taken
    pdl = runtime.use_dependent_launch(rows.device)
    runtime.launch(
        _take_params_kernel, (runtime.cdiv(num_rows, REQUEST_BLOCK),),
        rows.contiguous(), params.temperature, params.top_k, params.top_p, params.min_p, params.seed, taken.temperature,
        taken.top_k, taken.top_p, taken.min_p, taken.seed, num_rows, BLOCK=REQUEST_BLOCK, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return taken
