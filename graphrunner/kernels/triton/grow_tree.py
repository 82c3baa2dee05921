"""How a tree of drafts grows by a level, and which of its guesses are kept: a launch each.

Letters: R requests, B beams of a level, k children of a guess, G guesses of a level (k, then B * k), C hidden size.
Twin: the torch half of runner.eagle_grown_tree_draft_cuda_graph_runner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphrunner.core.draft_tree import LEAST_SURE, MAX_TREE_NODES, SUREST, TreeGrowth
from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.request_rows import DecodeInputs

_SUREST, _LEAST_SURE = tl.constexpr(SUREST), tl.constexpr(LEAST_SURE)
_MASK_COLUMNS = tl.constexpr(8)
_MAX_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class Growth:
    """A round's trees so far, device; beams stand level by level.

    Attributes:
        tokens, scores, parents: int32, float32, int32 [R, all candidates]; the log of the chance of the path to each;
            the number of the candidate that it follows, from 1, 0 for none.
        beam_tokens, beam_scores, beam_numbers: the same of all beams [R, beams]; the numbers are their own.
        beam_sees: int32 [R, beams]; bit j: follows beam j, or is it.
        hidden: float [R, beams, C]; what each beam follows left.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    beam_tokens: Tensor
    beam_scores: Tensor
    beam_numbers: Tensor
    beam_sees: Tensor
    hidden: Tensor


def new_growth(tree: TreeGrowth, root: Tensor) -> Growth:
    """Memory of R trees. root: float [R, C]."""
    num_requests, beams = root.shape[0], max(1, tree.num_beams * (tree.num_levels - 1))
    assert beams <= MAX_TREE_NODES

    def empty(width: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(num_requests, width, dtype=dtype, device=root.device)

    count = tree.num_candidates
    return Growth(
        empty(count), empty(count, torch.float32), empty(count), empty(beams), empty(beams, torch.float32),
        empty(beams), empty(beams), root.new_empty(num_requests, beams, root.shape[1]),
    )  # fmt: skip


@triton.jit
def _guesses(
    token_ptr, chance_ptr, beam_score_ptr, beam_number_ptr, request, i, is_in, LEVEL: tl.constexpr,
    BEAMS: tl.constexpr, CHILDREN: tl.constexpr, ALL_BEAMS: tl.constexpr,
):  # fmt: skip
    """Token, score and parent's number of the newest level's guesses."""
    if LEVEL == 0:
        at = request * CHILDREN + i
    else:
        at = request * (BEAMS * CHILDREN) + i
    token = tl.load(token_ptr + at, mask=is_in, other=-1)
    score = tl.load(chance_ptr + at, mask=is_in, other=0.0)
    score = tl.where(score > _LEAST_SURE, score, _LEAST_SURE)  # also what is no number
    score = tl.minimum(score, _SUREST)
    parent = tl.zeros_like(i)
    if LEVEL > 0:
        beam = request * ALL_BEAMS + (LEVEL - 1) * BEAMS + i // CHILDREN
        score += tl.load(beam_score_ptr + beam, mask=is_in, other=0.0)
        parent = tl.load(beam_number_ptr + beam, mask=is_in, other=0)
    return token, score, parent


@triton.jit
def _copy_row(from_ptr, to_ptr, also_ptr, width, HAS_ALSO: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    for start in range(0, width, COLUMNS):
        is_in = start + column < width
        values = tl.load(from_ptr + start + column, mask=is_in, other=0.0)
        tl.store(to_ptr + start + column, values, mask=is_in)
        if HAS_ALSO:
            tl.store(also_ptr + start + column, values, mask=is_in)


@triton.jit
def _grow_kernel(
    token_ptr, chance_ptr, left_ptr, all_tokens_ptr, all_scores_ptr, all_parents_ptr, beam_token_ptr, beam_score_ptr,
    beam_number_ptr, beam_sees_ptr, hidden_ptr, request_rows_ptr, num_computed_ptr, page_table_ptr, ids_ptr,
    positions_ptr, seq_lens_ptr, slots_ptr, mask_ptr, inputs_ptr, max_pages, max_token_id, width,
    LEVEL: tl.constexpr, BEAMS: tl.constexpr, CHILDREN: tl.constexpr, ALL_BEAMS: tl.constexpr,
    CANDIDATES: tl.constexpr, GUESSES: tl.constexpr, PAGE_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A token of the next step a program: all of a request's choose its newest beams, each writes its own token."""
    request = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    i = tl.arange(0, GUESSES)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    OLD: tl.constexpr = LEVEL * BEAMS
    TOKENS: tl.constexpr = OLD + BEAMS
    if LEVEL == 0:
        num_guesses: tl.constexpr = CHILDREN
        offset: tl.constexpr = 0
    else:
        num_guesses: tl.constexpr = BEAMS * CHILDREN
        offset: tl.constexpr = CHILDREN * (1 + (LEVEL - 1) * BEAMS)
    is_in = i < num_guesses
    tokens, scores, parents = _guesses(
        token_ptr, chance_ptr, beam_score_ptr, beam_number_ptr, request, i, is_in, LEVEL, BEAMS, CHILDREN, ALL_BEAMS
    )
    candidate = request * CANDIDATES + offset + i
    is_first = is_in & (j == 0)
    tl.store(all_tokens_ptr + candidate, tokens, mask=is_first)
    tl.store(all_scores_ptr + candidate, scores, mask=is_first)
    tl.store(all_parents_ptr + candidate, parents, mask=is_first)
    own = 0
    left = tl.where(is_in, scores, -float("inf"))
    for beam in tl.static_range(BEAMS):
        place = tl.min(tl.where(left == tl.max(left, 0), i, GUESSES - 1), 0)
        own = tl.where(j == OLD + beam, place, own)
        left = tl.where(i == place, -float("inf"), left)
    slot = request * ALL_BEAMS + j
    to_ptr = inputs_ptr + (request * TOKENS + j) * width
    if j < OLD:
        token = tl.load(beam_token_ptr + slot)
        sees = tl.load(beam_sees_ptr + slot)
        _copy_row(hidden_ptr + slot * width, to_ptr, to_ptr, width, False, COLUMNS)
    else:
        token = tl.sum(tl.where(i == own, tokens, 0), 0)
        sees = (j * 0 + 1) << j
        from_row = request
        if LEVEL > 0:
            parent = (LEVEL - 1) * BEAMS + own // CHILDREN
            sees = sees | tl.load(beam_sees_ptr + request * ALL_BEAMS + parent)
            from_row = request * OLD + parent
        tl.store(beam_token_ptr + slot, token)
        tl.store(beam_score_ptr + slot, tl.sum(tl.where(i == own, scores, 0.0), 0))
        tl.store(beam_number_ptr + slot, offset + own + 1)
        tl.store(beam_sees_ptr + slot, sees)
        _copy_row(left_ptr + from_row * width, to_ptr, hidden_ptr + slot * width, width, True, COLUMNS)
    other = tl.arange(0, _MASK_COLUMNS)
    at = request * TOKENS + j
    tl.store(mask_ptr + at * TOKENS + other, ((sees >> other) & 1).to(tl.uint8), mask=other < TOKENS)
    row = tl.load(request_rows_ptr + request).to(tl.int64)
    first = tl.maximum(tl.load(num_computed_ptr + row), 0)
    position = first + j
    # Past its last page a row writes to the dummy page rather than to memory nobody gave it.
    has_page = position // PAGE_SIZE < max_pages
    page = tl.load(page_table_ptr + row * max_pages + position // PAGE_SIZE, mask=has_page, other=0).to(tl.int64)
    tl.store(slots_ptr + at, page * PAGE_SIZE + position % PAGE_SIZE)
    tl.store(positions_ptr + at, (first + j // BEAMS).to(tl.int64))
    tl.store(ids_ptr + at, tl.where(row > 0, tl.minimum(tl.maximum(token, 0), max_token_id), 0))
    tl.store(seq_lens_ptr + request, first + TOKENS, mask=j == 0)


def grow(
    growth: Growth,
    tree: TreeGrowth,
    level: int,
    *,
    guesses: tuple[Tensor, Tensor],
    left: Tensor,
    request_rows: Tensor,
    num_computed: Tensor,
    page_table: Tensor,
    page_size: int,
    max_token_id: int,
    out: DecodeInputs,
) -> tuple[Tensor, Tensor]:
    """Take in the guesses of a level, and fill in the step over its best ones and all beams before them.

    Args:
        growth: written.
        level: from 0; `level * B` beams are there already.
        guesses: int32 and float32 [R, B, k] (level 0: [R, 1, k]), contiguous: tokens, logs of their own chances.
        left: float [R, level * B, C], contiguous: what the step before left; for level 0 [R, C], the root.
        request_rows: int32 [R], device; num_computed: int32 [num_rows]; page_table: int32 [num_rows, max_pages].
        out: written.

    Returns:
        The step's tree mask uint8 [R, n, n] and inputs [R, n, C], where n is (level + 1) * B. In graph: yes.
    """
    num_requests, width = request_rows.shape[0], left.shape[-1]
    num_tokens = (level + 1) * tree.num_beams
    mask = torch.empty(num_requests, num_tokens, num_tokens, dtype=torch.uint8, device=left.device)
    inputs = left.new_empty(num_requests, num_tokens, width)
    assert left.is_contiguous() and guesses[0].is_contiguous() and guesses[1].is_contiguous()
    num_guesses = tree.num_children * (tree.num_beams if level else 1)
    pdl = runtime.use_dependent_launch(left.device)
    runtime.launch(
        _grow_kernel, (num_requests, num_tokens),
        *guesses, left, growth.tokens, growth.scores, growth.parents, growth.beam_tokens, growth.beam_scores,
        growth.beam_numbers, growth.beam_sees, growth.hidden, request_rows, num_computed, page_table, out.input_ids,
        out.positions, out.seq_lens, out.slot_mapping, mask, inputs, page_table.shape[1], max_token_id, width,
        LEVEL=level, BEAMS=tree.num_beams, CHILDREN=tree.num_children, ALL_BEAMS=growth.beam_tokens.shape[1],
        CANDIDATES=tree.num_candidates, GUESSES=runtime.next_power_of_2(num_guesses), PAGE_SIZE=page_size,
        COLUMNS=min(_MAX_COLUMNS, runtime.next_power_of_2(width)), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return mask, inputs


@triton.jit
def _keep_best_kernel(
    token_ptr, chance_ptr, all_tokens_ptr, all_scores_ptr, all_parents_ptr, beam_score_ptr, beam_number_ptr,
    request_rows_ptr, drafts_ptr, draft_parents_ptr, first_ptr, max_drafts, LEVEL: tl.constexpr, BEAMS: tl.constexpr,
    CHILDREN: tl.constexpr, ALL_BEAMS: tl.constexpr, CANDIDATES: tl.constexpr, NODES: tl.constexpr,
    BLOCK: tl.constexpr, PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if LEVEL == 0:
        offset: tl.constexpr = 0
    else:
        offset: tl.constexpr = CHILDREN * (1 + (LEVEL - 1) * BEAMS)
    is_new = (i >= offset) & (i < CANDIDATES)
    is_old = i < offset
    tokens, scores, parents = _guesses(
        token_ptr, chance_ptr, beam_score_ptr, beam_number_ptr, request, i - offset, is_new, LEVEL, BEAMS, CHILDREN,
        ALL_BEAMS,
    )  # fmt: skip
    candidate = request * CANDIDATES + i
    tokens = tl.where(is_old, tl.load(all_tokens_ptr + candidate, mask=is_old, other=-1), tokens)
    scores = tl.where(is_old, tl.load(all_scores_ptr + candidate, mask=is_old, other=0.0), scores)
    parents = tl.where(is_old, tl.load(all_parents_ptr + candidate, mask=is_old, other=0), parents)
    left = tl.where(i < CANDIDATES, scores, -float("inf"))
    chosen = tl.zeros([BLOCK], tl.int32)
    for _ in tl.static_range(NODES):
        place = tl.min(tl.where(left == tl.max(left, 0), i, BLOCK - 1), 0)
        chosen = tl.where(i == place, 1, chosen)
        left = tl.where(i == place, -float("inf"), left)
    # A candidate's place among the chosen is how many of them stand before it; its number is one more than its index.
    place = tl.sum(tl.where(i[None, :] < i[:, None], chosen[None, :], 0), 1)
    node = tl.sum(tl.where(i[None, :] < parents[:, None], chosen[None, :], 0), 1)
    row = tl.load(request_rows_ptr + request).to(tl.int64)
    is_kept = chosen > 0
    tl.store(drafts_ptr + row * max_drafts + place, tokens, mask=is_kept & (row > 0))
    tl.store(draft_parents_ptr + row * max_drafts + place, node, mask=is_kept & (row > 0))
    tl.store(first_ptr + request + place * 0, tokens, mask=is_kept & (place == 0))
    after = tl.arange(0, PLACES)
    tl.store(drafts_ptr + row * max_drafts + after, -1, mask=(after < max_drafts) & ((after >= NODES) | (row <= 0)))


def keep_best(
    growth: Growth,
    tree: TreeGrowth,
    *,
    guesses: tuple[Tensor, Tensor],
    request_rows: Tensor,
    drafts: Tensor,
    draft_parents: Tensor,
) -> Tensor:
    """Take in the last level's guesses, and leave the best of all in the rows, parents before children.

    Args:
        guesses: as of `grow`.
        request_rows: int32 [R], device; 0 for padding.
        drafts, draft_parents: int32 [num_rows, at least num_nodes], contiguous; the rows are written; the dummy row
            gets no drafts.

    Returns:
        int32 [R], the first draft of each. In graph: yes. Sync: none.
    """
    num_requests, level = request_rows.shape[0], tree.num_levels - 1
    assert guesses[0].is_contiguous() and guesses[1].is_contiguous() and drafts.shape == draft_parents.shape
    first = torch.empty(num_requests, dtype=torch.int32, device=drafts.device)
    pdl = runtime.use_dependent_launch(drafts.device)
    runtime.launch(
        _keep_best_kernel, (num_requests,),
        *guesses, growth.tokens, growth.scores, growth.parents, growth.beam_scores, growth.beam_numbers, request_rows,
        drafts, draft_parents, first, drafts.shape[1], LEVEL=level, BEAMS=tree.num_beams, CHILDREN=tree.num_children,
        ALL_BEAMS=growth.beam_tokens.shape[1], CANDIDATES=tree.num_candidates, NODES=tree.num_nodes,
        BLOCK=runtime.next_power_of_2(tree.num_candidates), PLACES=runtime.next_power_of_2(drafts.shape[1]), PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return first
