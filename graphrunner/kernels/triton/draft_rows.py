"""First and last kernel of a draft step: place its tokens from the device rows, and leave the drafts there.

The rows have moved on already: `num_computed` of a row is where its newest token, not computed yet, will stand.
Twins: runner.draft_rows.place_round, place_step and store_drafts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.request_rows import REQUEST_BLOCK, DecodeInputs


@triton.jit(do_not_specialize=["R", "shift"])
def _place_kernel(
    request_rows_ptr, num_computed_ptr, num_new_ptr, tokens_ptr, page_table_ptr, ids_ptr, positions_ptr,
    seq_lens_ptr, slots_ptr, last_ptr, R, max_pages, max_token_id, shift, PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr, IS_ROUND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = request < R
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(request_rows_ptr + request, mask=is_in, other=0).to(tl.int64)
    first = tl.load(num_computed_ptr + row, mask=is_in, other=0) + shift
    if IS_ROUND:
        count = tl.load(num_new_ptr + request, mask=is_in, other=1)
        count = tl.where(row > 0, tl.minimum(tl.maximum(count, 1), WIDTH), 1)
        tl.store(last_ptr + request, (request * WIDTH + count - 1).to(tl.int64), mask=is_in)
        first = first - count
    first = tl.maximum(first, 0)
    tl.store(seq_lens_ptr + request, first + WIDTH, mask=is_in)
    for w in tl.static_range(WIDTH):
        place = request * WIDTH + w
        position = first + w
        # Past its last page a row writes to the dummy page rather than to memory nobody gave it.
        has_page = position // PAGE_SIZE < max_pages
        page = tl.load(page_table_ptr + row * max_pages + position // PAGE_SIZE, mask=is_in & has_page, other=0).to(
            tl.int64
        )
        token = tl.load(tokens_ptr + place, mask=is_in & (row > 0), other=0)
        tl.store(ids_ptr + place, tl.minimum(tl.maximum(token, 0), max_token_id), mask=is_in)
        tl.store(positions_ptr + place, position.to(tl.int64), mask=is_in)
        tl.store(slots_ptr + place, page * PAGE_SIZE + position % PAGE_SIZE, mask=is_in)


def place_tokens(
    request_rows: Tensor,
    num_computed: Tensor,
    page_table: Tensor,
    *,
    tokens: Tensor,
    page_size: int,
    max_token_id: int,
    out: DecodeInputs,
    shift: int = 0,
    num_new: Tensor | None = None,
    last: Tensor | None = None,
) -> None:
    """Fill a uniform draft step's inputs.

    Args:
        request_rows: int32 [R], device; 0 for padding, whose tokens are 0.
        num_computed: int32 [num_rows]; page_table: int32 [num_rows, max_pages].
        tokens: int32 [at least R * W], contiguous; anything outside the vocabulary counts as its nearest end.
        out: written; its sizes say W.
        shift: added to `num_computed` for the first position.
        num_new: int32 [R]; given when the step is the one that the rows just took: it began so many tokens ago.
        last: int64 [R]; written with num_new: each row's newest token in the step.

    In graph: yes. Sync: none.
    """
    num_requests = request_rows.shape[0]
    pdl = runtime.use_dependent_launch(request_rows.device)
    runtime.launch(
        _place_kernel, (runtime.cdiv(num_requests, REQUEST_BLOCK),),
        request_rows, num_computed, request_rows if num_new is None else num_new, tokens, page_table, out.input_ids,
        out.positions, out.seq_lens, out.slot_mapping, out.positions if last is None else last, num_requests,
        page_table.shape[1], max_token_id, shift, PAGE_SIZE=page_size, WIDTH=out.input_ids.shape[0] // num_requests,
        IS_ROUND=num_new is not None, BLOCK=REQUEST_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["R"])
def _store_kernel(
    request_rows_ptr, drafts_ptr, table_ptr, R, num_drafts, max_drafts, COLUMNS: tl.constexpr, PDL: tl.constexpr
):
    request = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(request_rows_ptr + request).to(tl.int64)
    place = tl.arange(0, COLUMNS)
    is_made = (place < num_drafts) & (row > 0)
    drafts = tl.load(drafts_ptr + request * num_drafts + place, mask=is_made, other=-1)
    tl.store(table_ptr + row * max_drafts + place, drafts, mask=place < max_drafts)


def store_drafts(request_rows: Tensor, drafts: Tensor, table: Tensor) -> None:
    """Write each row's drafts into the table, -1 after them and in the dummy row.

    Args:
        request_rows: int32 [R]; drafts: int32 [R, k], contiguous; table: int32 [num_rows, at least k].

    In graph: yes. Sync: none.
    """
    assert drafts.is_contiguous() and drafts.dtype is torch.int32 and drafts.shape[1] <= table.shape[1]
    pdl = runtime.use_dependent_launch(request_rows.device)
    runtime.launch(
        _store_kernel, (request_rows.shape[0],),
        request_rows, drafts, table, request_rows.shape[0], drafts.shape[1], table.shape[1],
        COLUMNS=runtime.next_power_of_2(table.shape[1]), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
