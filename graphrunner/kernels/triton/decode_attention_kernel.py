"""The kernels of decode_attention: one from qkv to the heads' output, and one that joins splits where few programs run.

Of the programs that share a sequence the last to arrive joins their results (JOINS), in the order of the splits
whatever the order of arrival; with few requests the whole card would wait for it, and a kernel of its own is sooner.
Source: split-KV decoding as in Flash-Decoding (Dao et al. 2023); the join by the last arriver as in stream-K products.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from graphrunner.kernels.triton.ask_l2 import ask_l2
from graphrunner.kernels.triton.attention_common import (
    head_norm,
    load_heads,
    masked_scores,
    rope_angles,
    softmax_step,
    to_cache,
)
from graphrunner.kernels.triton.split_sums import is_last_to_arrive


@triton.jit
def _new_token(
    qkv_ptr, k_cache_ptr, v_cache_ptr, slot, q, is_row, own, other, cos, sin, token, hk, scale_log2, eps, soft_cap,
    inverse_k_scale, inverse_v_scale, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    HALF: tl.constexpr, HAS_K_NORM: tl.constexpr, HAS_CAP: tl.constexpr, IS_FP8: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The step's only token of a request: store its key and value, and begin the softmax with it.

    Returns:
        The maximum, the sum and the weighted values, as `softmax_step`.
    """
    d = tl.arange(0, DP)
    one = tl.arange(0, 1)
    row = token.to(tl.int64) * ((HQ + 2 * HK) * D)
    k = load_heads(qkv_ptr, row + (HQ + hk) * D + one, one == 0, own, other, cos, sin, eps, D, DP, HALF, HAS_K_NORM)
    is_real = (d < D)[None, :]
    v = tl.load(qkv_ptr + row + (HQ + HK + hk) * D + d[None, :], mask=is_real, other=0.0)
    cache_dtype: tl.constexpr = k_cache_ptr.dtype.element_ty
    k_stored = to_cache(k, inverse_k_scale, cache_dtype, IS_FP8)
    v_stored = to_cache(v.to(tl.float32), inverse_v_scale, cache_dtype, IS_FP8)
    offsets = (slot * HK + hk) * D + d[None, :]
    tl.store(k_cache_ptr + offsets, k_stored, mask=is_real)
    tl.store(v_cache_ptr + offsets, v_stored, mask=is_real)
    scores = tl.sum(q.to(tl.float32) * k_stored.to(dtype).to(tl.float32), 1)
    m = masked_scores(scores, is_row, scale_log2, soft_cap, HAS_CAP)
    acc = tl.where(is_row[:, None], v_stored.to(dtype).to(tl.float32), 0.0)
    return m, tl.where(is_row, 1.0, 0.0), acc


@triton.jit
def _new_tokens(
    qkv_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, positions_ptr, own, other, cos_ptr, sin_ptr, first_token, hk,
    eps, inverse_k_scale, inverse_v_scale, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, NEW: tl.constexpr, HAS_K_NORM: tl.constexpr, IS_FP8: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Make, store and return the step's own keys and values of one head, as a later step will read them."""
    j = tl.arange(0, NEW)
    d = tl.arange(0, DP)
    is_new = j < WIDTH
    token = first_token + j
    position = tl.load(positions_ptr + token, mask=is_new, other=0)
    slot = tl.load(slot_mapping_ptr + token, mask=is_new, other=0)
    row = token.to(tl.int64) * ((HQ + 2 * HK) * D)
    cos, sin = rope_angles(cos_ptr, sin_ptr, position, is_new, DP, HALF)
    k = load_heads(qkv_ptr, row + (HQ + hk) * D, is_new, own, other, cos, sin, eps, D, DP, HALF, HAS_K_NORM)
    is_real = is_new[:, None] & (d < D)[None, :]
    v = tl.load(qkv_ptr + (row + (HQ + HK + hk) * D)[:, None] + d[None, :], mask=is_real, other=0.0)
    cache_dtype: tl.constexpr = k_cache_ptr.dtype.element_ty
    k_stored = to_cache(k, inverse_k_scale, cache_dtype, IS_FP8)
    v_stored = to_cache(v.to(tl.float32), inverse_v_scale, cache_dtype, IS_FP8)
    offsets = ((slot * HK + hk) * D)[:, None] + d[None, :]
    tl.store(k_cache_ptr + offsets, k_stored, mask=is_real)
    tl.store(v_cache_ptr + offsets, v_stored, mask=is_real)
    return k_stored.to(dtype), v_stored.to(dtype)


@triton.jit
def _new_tokens_visible(
    tree_mask_ptr, request, w, window, WIDTH: tl.constexpr, NEW: tl.constexpr, HAS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Which of the step's own tokens each query row sees: bool [rows, NEW]."""
    j = tl.arange(0, NEW)
    in_width = (j < WIDTH)[None, :] & (w < WIDTH)[:, None]
    if HAS_TREE:
        offsets = request * WIDTH * WIDTH + w[:, None] * WIDTH + j[None, :]
        is_visible = tl.load(tree_mask_ptr + offsets, mask=in_width, other=0) != 0
    else:
        is_visible = in_width & (j[None, :] <= w[:, None])
        if HAS_WINDOW:
            is_visible = is_visible & (j[None, :] > w[:, None] - window)
    return is_visible


@triton.jit
def _join_splits(
    partial_ptr, lse_ptr, out_ptr, first_token, T, hk, num_splits, HQ: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SP: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Weigh the splits' results of one (request, key head) by their sums."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    s = tl.arange(0, SP)
    is_row = r < GROUP * WIDTH
    row = (first_token + r // GROUP).to(tl.int64) * HQ + hk * GROUP + r % GROUP
    cell = s.to(tl.int64)[:, None] * T * HQ + row[None, :]
    is_cell = (s < num_splits)[:, None] & is_row[None, :]
    lse = tl.load(lse_ptr + cell, mask=is_cell, other=-1.0e30, cache_modifier=".cg")
    is_real = is_cell[:, :, None] & (d < D)[None, None, :]
    part = tl.load(partial_ptr + cell[:, :, None] * D + d[None, None, :], mask=is_real, other=0.0, cache_modifier=".cg")
    weight = tl.exp2(lse - tl.max(lse, 0)[None, :])
    joined = tl.sum(part * weight[:, :, None], 0) / tl.sum(weight, 0)[:, None]
    tl.store(out_ptr + row[:, None] * D + d[None, :], joined.to(dtype), mask=is_row[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["T", "max_pages", "SPLITS", "MIN_TILES"])
def decode_attention_kernel(
    qkv_ptr, k_cache_ptr, v_cache_ptr, page_table_ptr, request_rows_ptr, seq_lens_ptr, slot_mapping_ptr,
    positions_ptr, query_start_loc_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, tree_mask_ptr, out_ptr, partial_ptr,
    lse_ptr, arrived_ptr, max_pages, T, scale_log2, eps, soft_cap, v_scale, inverse_k_scale, inverse_v_scale, window,
    SPLITS, MIN_TILES,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, NEW: tl.constexpr, BLOCK_N: tl.constexpr, IS_SPLIT: tl.constexpr, JOINS: tl.constexpr,
    JOIN_ROWS: tl.constexpr, SP: tl.constexpr, PAGE: tl.constexpr, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_TREE: tl.constexpr, IS_FP8: tl.constexpr,
    IS_MIXED: tl.constexpr, ANGLE_BYTES: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    hk = tl.program_id(1)
    request = tl.program_id(2)
    first_token = request * WIDTH
    if IS_MIXED:
        first_token = tl.load(query_start_loc_ptr + request)
        if tl.load(query_start_loc_ptr + request + 1) != first_token + 1:
            # A prompt's chunk, or padding. It waits all the same: who waits for this kernel counts on all before it.
            if PDL:
                tl.extra.cuda.gdc_wait()
            return
    GROUP: tl.constexpr = HQ // HK
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    table_row_ptr = page_table_ptr + tl.load(request_rows_ptr + request).to(tl.int64) * max_pages
    cached = tl.maximum(tl.load(seq_lens_ptr + request) - WIDTH, 0)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, DP)
    r = tl.arange(0, ROWS)
    w = r // GROUP
    is_row = r < GROUP * WIDTH
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(cached - window + 1, 0) // BLOCK_N
    last_tile = tl.cdiv(cached, BLOCK_N)
    num_tiles = tl.maximum(last_tile - first_tile, 1)
    per_split = tl.cdiv(num_tiles, SPLITS)
    num_splits = SPLITS
    if JOINS:
        per_split = tl.maximum(per_split, MIN_TILES)
        num_splits = tl.cdiv(num_tiles, per_split)
        if split >= num_splits:
            if PDL:
                tl.extra.cuda.gdc_wait()
            return
    start = first_tile + split * per_split
    # At least one turn, all masked if need be: the wait and the new tokens are in it.
    stop = tl.maximum(tl.minimum(start + per_split, last_tile), start + 1)
    token = first_token + w
    # What depends on no kernel of this layer is loaded, or at least asked for, before the wait.
    q_own, q_other = head_norm(q_norm_ptr, D, DP, HALF, HAS_Q_NORM)
    k_own, k_other = head_norm(k_norm_ptr, D, DP, HALF, HAS_K_NORM)
    if WIDTH == 1:
        one = tl.arange(0, 1)
        cos, sin = rope_angles(cos_ptr, sin_ptr, tl.load(positions_ptr + first_token + one), one == 0, DP, HALF)
        slot = tl.load(slot_mapping_ptr + first_token)
    else:
        position = tl.load(positions_ptr + token, mask=is_row, other=0)
        if ANGLE_BYTES != "0":
            ask_l2(cos_ptr + position * HALF, ANGLE_BYTES)
            ask_l2(sin_ptr + position * HALF, ANGLE_BYTES)
    q = tl.zeros([ROWS, DP], dtype)
    m = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for t in tl.range(start, stop, num_stages=STAGES):
        o = t * BLOCK_N + n
        is_cached = o < cached
        page = tl.load(table_row_ptr + o // PAGE, mask=is_cached, other=0).to(tl.int64)
        offsets = (((page * PAGE + o % PAGE) * HK + hk) * D)[:, None] + d[None, :]
        is_real = is_cached[:, None] & (d < D)[None, :]
        k = tl.load(k_cache_ptr + offsets, mask=is_real, other=0.0)
        v = tl.load(v_cache_ptr + offsets, mask=is_real, other=0.0)
        if t == start:
            q_rows = token.to(tl.int64) * ((HQ + 2 * HK) * D) + (hk * GROUP + r % GROUP) * D
            if PDL:
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            if WIDTH > 1:
                cos, sin = rope_angles(cos_ptr, sin_ptr, position, is_row, DP, HALF)
            q = load_heads(
                qkv_ptr, q_rows, is_row, q_own, q_other, cos, sin, eps, D, DP, HALF, HAS_Q_NORM
            ).to(dtype)  # fmt: skip
            if split == num_splits - 1:
                if WIDTH == 1:
                    m, total, acc = _new_token(
                        qkv_ptr, k_cache_ptr, v_cache_ptr, slot, q, is_row, k_own, k_other, cos, sin, first_token, hk,
                        scale_log2, eps, soft_cap, inverse_k_scale, inverse_v_scale, HQ, HK, D, DP, HALF, HAS_K_NORM,
                        HAS_CAP, IS_FP8, dtype,
                    )  # fmt: skip
                else:
                    k_new, v_new = _new_tokens(
                        qkv_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, positions_ptr, k_own, k_other, cos_ptr,
                        sin_ptr, first_token, hk, eps, inverse_k_scale, inverse_v_scale, HQ, HK, D, DP, HALF, WIDTH,
                        NEW, HAS_K_NORM, IS_FP8, dtype,
                    )  # fmt: skip
                    sees_new = _new_tokens_visible(tree_mask_ptr, request, w, window, WIDTH, NEW, HAS_TREE, HAS_WINDOW)
                    new_scores = tl.dot(q, tl.trans(k_new), input_precision="ieee")
                    new_scores = masked_scores(new_scores, sees_new, scale_log2, soft_cap, HAS_CAP)
                    m, total, acc = softmax_step(new_scores, sees_new, v_new, m, total, acc)
        is_visible = is_cached[None, :] & is_row[:, None]
        if HAS_WINDOW:
            is_visible = is_visible & (o[None, :] > (cached + w - window)[:, None])
        scores = tl.dot(q, tl.trans(k.to(dtype)), input_precision="ieee")
        scores = masked_scores(scores, is_visible, scale_log2, soft_cap, HAS_CAP)
        m, total, acc = softmax_step(scores, is_visible, v.to(dtype), m, total, acc)
    result = acc * (v_scale / tl.maximum(total, 1.0e-30))[:, None]
    row = (first_token + w).to(tl.int64) * HQ + hk * GROUP + r % GROUP
    is_real = is_row[:, None] & (d < D)[None, :]
    if not IS_SPLIT or (JOINS and num_splits == 1):
        tl.store(out_ptr + row[:, None] * D + d[None, :], result.to(dtype), mask=is_real)
    elif IS_SPLIT:
        rows_before = split.to(tl.int64) * T * HQ
        lse = tl.where(total > 0.0, m + tl.log2(tl.maximum(total, 1.0e-30)), -1.0e30)
        tl.store(partial_ptr + (rows_before + row)[:, None] * D + d[None, :], result, mask=is_real)
        tl.store(lse_ptr + rows_before + row, lse, mask=is_row)
        if JOINS:
            cell_ptr = arrived_ptr + request * HK + hk
            if is_last_to_arrive(cell_ptr, num_splits):
                _join_splits(
                    partial_ptr, lse_ptr, out_ptr, first_token, T, hk, num_splits, HQ, GROUP, D, DP, WIDTH, JOIN_ROWS,
                    SP, dtype,
                )  # fmt: skip
                tl.store(cell_ptr, 0)  # ready for the next layer


@triton.jit(do_not_specialize=["num_heads"])
def combine_kernel(
    partial_ptr, lse_ptr, out_ptr, num_heads, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Join the splits of one (token, head).

    Like a norm (norms._rms_norm_kernel) it lets its successor start before its own wait, and for the same reason: the
    output projection behind it fetches weights while attention still runs.
    """
    i = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DP)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    lse = tl.load(lse_ptr + s * num_heads + i)
    part = tl.load(
        partial_ptr + (s.to(tl.int64) * num_heads + i)[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0
    )
    weight = tl.exp2(lse - tl.max(lse, 0))
    joined = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + i * D + d, joined.to(out_ptr.dtype.element_ty), mask=d < D)
