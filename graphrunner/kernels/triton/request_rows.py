"""First and last kernel of a captured decode step: read the request rows, and advance them.

The rows live on the device (last token, number of computed tokens, pages), so a step whose batch did not change
needs no copy from the host. Row 0 is the dummy row of padding requests: zero tokens, all pages page 0, never advanced.
Twins: reference_gpu.gather_decode_inputs, reference_gpu.accept_drafts, reference_gpu.advance_rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphrunner.kernels.triton import runtime

REQUEST_BLOCK = 128
"""Requests a program, as many as it has threads: fewer would be no faster, and all sizes share one compiled kernel."""


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a decode (or verify) step of R requests and width W reads, device.

    Attributes:
        input_ids: int32 [R * W].
        positions: int64 [R * W].
        seq_lens: int32 [R]; this step included.
        slot_mapping: int64 [R * W].
    """

    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The drafts of a verify step of R requests, device.

    Attributes:
        table: int32 [num_rows, max_drafts]; by row, -1 from where there is none.
        num_drafts: int32 [R]; how many of them each request verifies.
        draft_tokens: int32 [R, W - 1]; written: those drafts, -1 after them.
    """

    table: Tensor
    num_drafts: Tensor
    draft_tokens: Tensor


@triton.jit(do_not_specialize=["R"])
def _gather_kernel(
    request_rows_ptr, last_token_ptr, draft_table_ptr, num_drafts_ptr, drafts_ptr, num_computed_ptr, page_table_ptr,
    ids_ptr, positions_ptr, seq_lens_ptr, slots_ptr, R, max_pages, max_drafts, PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = request < R
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(request_rows_ptr + request, mask=is_real, other=0).to(tl.int64)
    computed = tl.load(num_computed_ptr + row, mask=is_real, other=0)
    tl.store(seq_lens_ptr + request, computed + WIDTH, mask=is_real)
    if WIDTH > 1:
        num_drafts = tl.load(num_drafts_ptr + request, mask=is_real, other=0)
    for w in tl.static_range(WIDTH):
        token = request * WIDTH + w
        position = computed + w
        # Past its last page a row writes to the dummy page rather than to memory nobody gave it.
        has_page = position // PAGE_SIZE < max_pages
        page = tl.load(page_table_ptr + row * max_pages + position // PAGE_SIZE, mask=is_real & has_page, other=0).to(
            tl.int64
        )
        if w == 0:
            token_id = tl.load(last_token_ptr + row, mask=is_real, other=0)
        else:
            has_draft = is_real & (w - 1 < num_drafts)
            draft = tl.load(draft_table_ptr + row * max_drafts + w - 1, mask=has_draft, other=-1)
            tl.store(drafts_ptr + request * (WIDTH - 1) + w - 1, draft, mask=is_real)
            token_id = tl.maximum(draft, 0)
        tl.store(ids_ptr + token, token_id, mask=is_real)
        tl.store(positions_ptr + token, position.to(tl.int64), mask=is_real)
        tl.store(slots_ptr + token, page * PAGE_SIZE + position % PAGE_SIZE, mask=is_real)


def gather_decode_inputs(
    request_rows: Tensor,
    last_token: Tensor,
    num_computed: Tensor,
    page_table: Tensor,
    page_size: int,
    out: DecodeInputs,
    drafts: DraftInputs | None = None,
) -> None:
    """Fill a uniform step's inputs from the device rows.

    Args:
        request_rows: int32 [R], device; row of each request of the batch, 0 for padding.
        last_token: int32 [num_rows]; the newest token, whose keys and values are not stored yet.
        num_computed: int32 [num_rows]; tokens whose keys and values are stored.
        page_table: int32 [num_rows, max_pages].
        page_size: tokens a page.
        out: written; its sizes say W.
        drafts: for W > 1: what to verify after the last token; where there is none the model reads token 0.

    In graph: yes. Sync: none.
    """
    num_requests = request_rows.shape[0]
    width = out.input_ids.shape[0] // num_requests
    assert (drafts is None) == (width == 1)
    table, num_drafts, draft_tokens = (
        (last_token, last_token, last_token)
        if drafts is None
        else (drafts.table, drafts.num_drafts, drafts.draft_tokens)
    )
    pdl = runtime.use_dependent_launch(request_rows.device)
    runtime.launch(
        _gather_kernel, (runtime.cdiv(num_requests, REQUEST_BLOCK),),
        request_rows, last_token, table, num_drafts, draft_tokens, num_computed, page_table, out.input_ids,
        out.positions, out.seq_lens, out.slot_mapping, num_requests, page_table.shape[1],
        0 if drafts is None else table.shape[1], PAGE_SIZE=page_size, WIDTH=width, BLOCK=REQUEST_BLOCK, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["R"])
def _accept_kernel(
    drafts_ptr, target_ptr, tokens_ptr, num_new_ptr, R, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = request < R
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_kept = is_real
    num_new = tl.zeros([BLOCK], dtype=tl.int32)
    for w in tl.static_range(WIDTH):
        target = tl.load(target_ptr + request * WIDTH + w, mask=is_real, other=0)
        tl.store(tokens_ptr + request * WIDTH + w, tl.where(is_kept, target, -1), mask=is_real)
        num_new += is_kept.to(tl.int32)
        if w < WIDTH - 1:
            draft = tl.load(drafts_ptr + request * (WIDTH - 1) + w, mask=is_real, other=-1)
            is_kept = is_kept & (draft == target)
    tl.store(num_new_ptr + request, num_new, mask=is_real)


def accept_drafts(draft_tokens: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Keep each draft as far as the target picked the same tokens, and the target's next token after it.

    Args:
        draft_tokens: int32 [R, W - 1], device; -1 where a request has fewer.
        target_ids: int32 [R * W], device; the target's pick after each token of the step.

    Returns:
        token_ids int32 [R, W], -1 after the last one kept; num_new int32 [R], 1 to W.

    In graph: yes. Sync: none.
    """
    num_requests, width = draft_tokens.shape[0], draft_tokens.shape[1] + 1
    tokens = torch.empty(num_requests, width, dtype=torch.int32, device=target_ids.device)
    num_new = torch.empty(num_requests, dtype=torch.int32, device=target_ids.device)
    pdl = runtime.use_dependent_launch(target_ids.device)
    runtime.launch(
        _accept_kernel, (runtime.cdiv(num_requests, REQUEST_BLOCK),),
        draft_tokens.contiguous(), target_ids, tokens, num_new, num_requests, WIDTH=width, BLOCK=REQUEST_BLOCK, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return tokens, num_new


@triton.jit(do_not_specialize=["R"])
def _advance_kernel(
    request_rows_ptr, token_ptr, num_new_ptr, last_token_ptr, num_computed_ptr, ring_ptr, step_ptr, R, ring_len,
    ring_width, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_NUM_NEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program, so that the step counter moves once."""
    request = tl.arange(0, BLOCK)
    is_in = request < R
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    step = tl.load(step_ptr)
    row = tl.load(request_rows_ptr + request, mask=is_in, other=0).to(tl.int64)
    num_new = tl.full([BLOCK], 1, tl.int32)
    if HAS_NUM_NEW:
        num_new = tl.load(num_new_ptr + request, mask=is_in, other=0)
    ring_row_ptr = ring_ptr + (step % ring_len) * ring_width
    for w in tl.static_range(WIDTH):
        token = tl.load(token_ptr + request * WIDTH + w, mask=is_in, other=0)
        tl.store(ring_row_ptr + request * WIDTH + w, tl.where(w < num_new, token, -1), mask=is_in)
        tl.store(last_token_ptr + row, token, mask=is_in & (row != 0) & (w == num_new - 1))
    computed = tl.load(num_computed_ptr + row, mask=is_in, other=0)
    tl.store(num_computed_ptr + row, computed + num_new, mask=is_in & (row != 0))
    tl.debug_barrier()  # every warp has read the counter before it moves
    tl.store(step_ptr, step + 1)


def advance_rows(
    request_rows: Tensor,
    tokens: Tensor,
    last_token: Tensor,
    num_computed: Tensor,
    output_ring: Tensor,
    step_counter: Tensor,
    num_new: Tensor | None = None,
) -> None:
    """Write the sampled tokens back to the rows and into the ring that the host reads a step later.

    Args:
        request_rows: int32 [R], device; distinct but for 0, the dummy row, which stays untouched.
        tokens: int32 [R] or [R, W], device.
        last_token, num_computed: int32 [num_rows]; advanced.
        output_ring: int32 [ring_len, at least R * W], contiguous; row step % ring_len is written, -1 where a
            row has no further token.
        step_counter: int64 [1]; advanced by one.
        num_new: int32 [R], 0 to W: tokens each row really got; None is one each.

    In graph: yes. Sync: none.
    """
    num_requests = request_rows.shape[0]
    pdl = runtime.use_dependent_launch(tokens.device)
    assert tokens.is_contiguous() and output_ring.is_contiguous() and output_ring.shape[1] >= tokens.numel()
    assert step_counter.dtype is torch.int64
    runtime.launch(
        _advance_kernel, (1,),
        request_rows, tokens, num_new if num_new is not None else request_rows, last_token, num_computed, output_ring,
        step_counter, num_requests, output_ring.shape[0], output_ring.shape[1],
        WIDTH=tokens.numel() // num_requests, BLOCK=max(REQUEST_BLOCK, runtime.next_power_of_2(num_requests)),
        HAS_NUM_NEW=num_new is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
