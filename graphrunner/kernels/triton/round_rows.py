"""What a round leaves for the draft after it, in one launch. Twins: the copies of runner.round_inputs."""

import triton
import triton.language as tl
from torch import Tensor

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.request_rows import REQUEST_BLOCK

_MAX_COLUMNS = 1024


@triton.jit(do_not_specialize=["num_requests"])
def _copy_round_kernel(
    hidden_ptr, tokens_ptr, num_new_ptr, out_hidden_ptr, out_tokens_ptr, out_num_new_ptr, num_requests, width,
    BLOCK: tl.constexpr, HAS_NUM_NEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row and a piece of its columns a program."""
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * width + column
    tl.store(out_hidden_ptr + at, tl.load(hidden_ptr + at, mask=column < width), mask=column < width)
    if tl.program_id(1) == 0:
        tl.store(out_tokens_ptr + row, tl.load(tokens_ptr + row))
        if HAS_NUM_NEW:
            if row < num_requests:
                tl.store(out_num_new_ptr + row, tl.load(num_new_ptr + row))


def copy_round(
    hidden: Tensor,
    token_ids: Tensor,
    out_hidden: Tensor,
    out_token_ids: Tensor,
    num_new: Tensor | None = None,
    out_num_new: Tensor | None = None,
) -> None:
    """Copy rows, a token each, and how far each request moved.

    Args:
        hidden: float [T, C]; token_ids: int32 [T]; num_new: int32 [R], R at most T. Contiguous, device.
        out_hidden, out_token_ids, out_num_new: at least as long, contiguous; their first rows are written.

    In graph: yes. Sync: none.
    """
    num_rows, width = hidden.shape
    assert hidden.is_contiguous() and out_hidden.is_contiguous() and out_hidden.shape[1] == width
    assert token_ids.is_contiguous() and token_ids.numel() == num_rows and (num_new is None) == (out_num_new is None)
    assert num_new is None or num_new.shape[0] <= num_rows
    if num_rows == 0:
        return
    block = min(_MAX_COLUMNS, runtime.next_power_of_2(width))
    pdl = runtime.use_dependent_launch(hidden.device)
    runtime.launch(
        _copy_round_kernel, (num_rows, runtime.cdiv(width, block)),
        hidden, token_ids, token_ids if num_new is None else num_new, out_hidden, out_token_ids,
        out_token_ids if out_num_new is None else out_num_new, 0 if num_new is None else num_new.shape[0], width,
        BLOCK=block, HAS_NUM_NEW=num_new is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_requests"])
def _keep_newest_kernel(
    ids_ptr, num_new_ptr, out_ids_ptr, out_num_new_ptr, num_requests, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = request < num_requests
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_new = tl.load(num_new_ptr + request, mask=is_in, other=1)
    last = tl.minimum(tl.maximum(num_new, 1), WIDTH) - 1
    tl.store(out_ids_ptr + request, tl.load(ids_ptr + request * WIDTH + last, mask=is_in), mask=is_in)
    tl.store(out_num_new_ptr + request, num_new, mask=is_in)


def keep_newest(input_ids: Tensor, num_new: Tensor, out_ids: Tensor, out_num_new: Tensor) -> None:
    """The last input of each request that stands, and how far it moved.

    Args:
        input_ids: int32 [R * W], device; num_new: int32 [R], 1 to W.
        out_ids, out_num_new: int32 [at least R]; written.

    In graph: yes. Sync: none.
    """
    num_requests = num_new.shape[0]
    pdl = runtime.use_dependent_launch(input_ids.device)
    runtime.launch(
        _keep_newest_kernel, (runtime.cdiv(num_requests, REQUEST_BLOCK),),
        input_ids, num_new, out_ids, out_num_new, num_requests, WIDTH=input_ids.shape[0] // num_requests,
        BLOCK=REQUEST_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
