"""A verify step over trees beyond a plain one: where its tokens stand, which path is right, and what moves for it.

Letters: R requests, W tokens of the tree, at most 8, the last one before it included; parents come before children.
Trees are so small that a request's depths, ancestors or path are the digits of one integer.
Twins: runner.tree_step.TreeStep, sampling.tree.walk, sampling.tree.move_kv and sampling.tree.reordered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.request_rows import REQUEST_BLOCK

MAX_WIDTH = 8
_MAX_COLUMNS = 256
_WORD_BYTES = 8


@triton.jit(do_not_specialize=["R"])
def _place_tree_kernel(
    request_rows_ptr, table_ptr, parents_ptr, mask_ptr, seq_lens_ptr, positions_ptr, R, WIDTH: tl.constexpr,
    IS_GROWN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = request < R
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(request_rows_ptr + request, mask=is_in, other=0).to(tl.int64)
    first = (tl.load(seq_lens_ptr + request, mask=is_in, other=WIDTH) - WIDTH).to(tl.int64)
    depths = tl.zeros([BLOCK], tl.int32)  # 4 bits a token
    sees = tl.full([BLOCK], 1, tl.int64)  # 8 bits a token
    for w in tl.static_range(WIDTH):
        depth = tl.zeros([BLOCK], tl.int32)
        seen = tl.full([BLOCK], 1, tl.int64)
        if w > 0:
            edge = request * (WIDTH - 1) + w - 1
            if IS_GROWN:
                parent = tl.load(table_ptr + row * (WIDTH - 1) + w - 1, mask=is_in, other=0).to(tl.int64)
                tl.store(parents_ptr + edge, parent, mask=is_in)
            else:
                parent = tl.load(parents_ptr + edge, mask=is_in, other=0)
            depth = ((depths >> (4 * parent).to(tl.int32)) & 15) + 1
            depths = depths | (depth << (4 * w))
            seen = ((sees >> (8 * parent)) & 255) | (1 << w)
            sees = sees | (seen << (8 * w))
        token = request * WIDTH + w
        tl.store(positions_ptr + token, first + depth, mask=is_in)
        if IS_GROWN:
            for other in tl.static_range(WIDTH):
                tl.store(mask_ptr + token * WIDTH + other, ((seen >> other) & 1).to(tl.uint8), mask=is_in)


def place_tree(
    seq_lens: Tensor,
    parents: Tensor,
    positions: Tensor,
    *,
    request_rows: Tensor,
    mask: Tensor,
    draft_parents: Tensor | None = None,
) -> None:
    """Give each token the position it would stand at; where trees grew, note their shapes first.

    Args:
        seq_lens: int32 [R], device; the step included.
        parents: int64 [at least R, W - 1], contiguous; written with draft_parents.
        positions: int64 [R * W]; written.
        request_rows: int32 [R].
        mask: uint8 [at least R, W, W], contiguous; written with draft_parents.
        draft_parents: int32 [num_rows, W - 1], contiguous; by row, the token that each draft follows.

    In graph: yes. Sync: none.
    """
    num_requests, width = request_rows.shape[0], parents.shape[1] + 1
    assert width <= MAX_WIDTH and parents.is_contiguous() and mask.is_contiguous()
    assert draft_parents is None or draft_parents.shape[1] == width - 1
    pdl = runtime.use_dependent_launch(seq_lens.device)
    runtime.launch(
        _place_tree_kernel, (runtime.cdiv(num_requests, REQUEST_BLOCK),),
        request_rows, request_rows if draft_parents is None else draft_parents, parents, mask, seq_lens, positions,
        num_requests, WIDTH=width, IS_GROWN=draft_parents is not None, BLOCK=REQUEST_BLOCK, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["R"])
def _walk_kernel(
    drafts_ptr, target_ptr, parents_ptr, tokens_ptr, num_new_ptr, order_ptr, R, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """In one pass: the children of a token stand after it, and at most one of them says what the target says."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = request < R
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    current = tl.zeros([BLOCK], tl.int32)
    path = tl.zeros([BLOCK], tl.int32)  # 4 bits a place
    num_new = tl.full([BLOCK], 1, tl.int32)
    wanted = tl.load(target_ptr + request * WIDTH, mask=is_in, other=-1)
    for w in tl.static_range(1, WIDTH):
        edge = request * (WIDTH - 1) + w - 1
        draft = tl.load(drafts_ptr + edge, mask=is_in, other=-1)
        parent = tl.load(parents_ptr + edge, mask=is_in, other=-1)
        is_next = (parent == current) & (draft == wanted) & (draft >= 0)
        node = tl.full([BLOCK], w, tl.int32)
        path = path | tl.where(is_next, node << (4 * num_new), 0)
        num_new += is_next.to(tl.int32)
        current = tl.where(is_next, node, current)
        wanted = tl.load(target_ptr + request * WIDTH + current, mask=is_in, other=-1)
    for place in tl.static_range(WIDTH):
        is_kept = place < num_new
        node = tl.where(is_kept, (path >> (4 * place)) & 15, place)
        token = tl.load(target_ptr + request * WIDTH + node, mask=is_in & is_kept, other=-1)
        tl.store(tokens_ptr + request * WIDTH + place, token, mask=is_in)
        tl.store(order_ptr + request * WIDTH + place, node.to(tl.int64), mask=is_in)
    tl.store(num_new_ptr + request, num_new, mask=is_in)


def walk(draft_tokens: Tensor, target_ids: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Walk down from the last token as long as some node says what the target says.

    Args:
        draft_tokens: int32 [R, W - 1], device, -1 where a request has none; siblings differ.
        target_ids: int32 [R * W]; the target's pick after each token of the tree.
        parents: int64 [R, W - 1]; the token that each draft follows.

    Returns:
        token_ids int32 [R, W], num_new int32 [R] and order int64 [R, W]; see sampling.tree.AcceptedPath.

    In graph: yes. Sync: none.
    """
    num_requests, width = draft_tokens.shape[0], draft_tokens.shape[1] + 1
    assert width <= MAX_WIDTH and draft_tokens.is_contiguous() and parents.is_contiguous()
    assert parents.shape == draft_tokens.shape
    tokens = torch.empty(num_requests, width, dtype=torch.int32, device=target_ids.device)
    num_new = torch.empty(num_requests, dtype=torch.int32, device=target_ids.device)
    order = torch.empty(num_requests, width, dtype=torch.int64, device=target_ids.device)
    pdl = runtime.use_dependent_launch(target_ids.device)
    runtime.launch(
        _walk_kernel, (runtime.cdiv(num_requests, REQUEST_BLOCK),),
        draft_tokens, target_ids, parents, tokens, num_new, order, num_requests, WIDTH=width, BLOCK=REQUEST_BLOCK,
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return tokens, num_new, order


@dataclass(frozen=True, slots=True)
class RowTable:
    """Tensors of rows that move together, by address: they must stay where they are.

    Attributes:
        cells: int64 [number of tensors, 2], device; the address of each, and the bytes of its rows.
        longest_bytes: of the longest rows.
        word_bytes: a power of two, at most 8, that divides all addresses and lengths.
    """

    cells: Tensor
    longest_bytes: int
    word_bytes: int


def row_table(halves: Sequence[Tensor], device: torch.device) -> RowTable:
    """Describe KV halves, contiguous [num_pages, page_size, Hk, D] each. Copies to the device; not in a graph.

    Raises:
        RuntimeError: inside a recording, whose replays would copy from memory that is gone.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a table of addresses cannot be made inside a recording")
    assert all(half.is_contiguous() for half in halves)
    cells = [(half.data_ptr(), half.stride(1) * half.element_size()) for half in halves]
    common = gcd(_WORD_BYTES, *(number for cell in cells for number in cell))
    return RowTable(torch.tensor(cells, device=device), max(length for _, length in cells), common)


@triton.jit(do_not_specialize=["num_halves"])
def _move_kernel(
    cells_ptr, rows_ptr, order_ptr, slots_ptr, num_halves, row_bytes, WORD_BYTES: tl.constexpr, WIDTH: tl.constexpr,
    PLACES: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tensor and a request a program. Everything is read before anything is written: a row may be both."""
    half = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, PLACES)
    column = tl.arange(0, COLUMNS)
    if WORD_BYTES == 8:
        word: tl.constexpr = tl.int64
    elif WORD_BYTES == 4:
        word: tl.constexpr = tl.int32
    elif WORD_BYTES == 2:
        word: tl.constexpr = tl.int16
    else:
        word: tl.constexpr = tl.int8
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_in = place < WIDTH
    source = tl.load(order_ptr + request * WIDTH + place, mask=is_in, other=0)
    is_moved = is_in & (source != place)
    if half < num_halves:
        base = tl.load(cells_ptr + 2 * half)
        num_words = tl.load(cells_ptr + 2 * half + 1) // WORD_BYTES
        source = tl.load(slots_ptr + request * WIDTH + source, mask=is_moved, other=0)
        target = tl.load(slots_ptr + request * WIDTH + place, mask=is_moved, other=0)
    else:  # the rows of the step's own tokens
        base = rows_ptr.to(tl.int64)
        num_words = (row_bytes // WORD_BYTES).to(tl.int64)
        source = request * WIDTH + source
        target = request * WIDTH + place
    start_ptr = base.to(tl.pointer_type(word))
    for start in range(0, num_words, COLUMNS):
        at = start + column
        is_real = is_moved[:, None] & (at < num_words)[None, :]
        words = tl.load(start_ptr + (source * num_words)[:, None] + at[None, :], mask=is_real, other=0)
        tl.debug_barrier()
        tl.store(start_ptr + (target * num_words)[:, None] + at[None, :], words, mask=is_real)


def move_rows(table: RowTable, slots: Tensor, order: Tensor, rows: Tensor | None = None) -> None:
    """Move rows of all tensors in one launch, in place.

    Args:
        table: tensors whose rows are slots; all that the path's tokens left there moves to the first slots.
        slots: int64 [R * W], device; of each token; distinct, but for those of padding.
        order: int64 [R, W]; the token whose rows go to each place; its own where nothing moves.
        rows: float [R * W, C], contiguous; the tokens' own, which move too.

    In graph: yes. Sync: none.
    """
    num_requests, width = order.shape
    num_halves, row_bytes, word_bytes = table.cells.shape[0], 0, table.word_bytes
    if rows is not None:
        assert rows.is_contiguous() and rows.shape[0] == num_requests * width
        row_bytes = rows.shape[1] * rows.element_size()
        word_bytes = gcd(word_bytes, row_bytes, rows.data_ptr())
    columns = min(_MAX_COLUMNS, runtime.next_power_of_2(table.longest_bytes // word_bytes))
    pdl = runtime.use_dependent_launch(order.device)
    runtime.launch(
        _move_kernel, (num_halves + (rows is not None), num_requests),
        table.cells, slots if rows is None else rows, order, slots, num_halves, row_bytes, WORD_BYTES=word_bytes,
        WIDTH=width, PLACES=runtime.next_power_of_2(width), COLUMNS=columns, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
