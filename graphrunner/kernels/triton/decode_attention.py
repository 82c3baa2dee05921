"""Paged attention of a uniform step (decode, or verify at width 2 to 8): one kernel from qkv to the heads' output.

A program owns one (request, key head, split of the sequence). It fills its ring of key and value tiles before the
projection that makes qkv has finished (see linear_kernels, Note [weights before wait]): cached tokens depend on no
kernel of this layer. The last split also normalises, rotates and stores the step's own keys and values.
The grid is fixed by the batch size, so that it is static inside a graph; the tiles of a sequence are shared out at run
time, to fewer programs where it is short. Of the programs that share a sequence the last to arrive joins their results,
in the order of the splits whatever the order of arrival.
Twin: reference.rope_store_attention. Source: split-KV decoding as in Flash-Decoding (Dao et al. 2023); the join by the
last arriver as in stream-K products.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.attention_common import (
    LOG2_E,
    AttentionLayer,
    DecodeMetadata,
    ExtendMetadata,
    check_cache,
    load_rotated,
    masked_scores,
    softmax_step,
    to_cache,
)
from graphrunner.kernels.triton.decode_attention_config import DecodeAttentionConfig, select_decode_config

MAX_QUERY_WIDTH = 8
_JOINED_VALUES = 4096
"""Numbers a program joins at a time: 64 registers a thread where there are two warps."""


@triton.jit
def _new_tokens(
    qkv_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, positions_ptr, k_norm_ptr, cos_ptr, sin_ptr, first_token, hk,
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
    k = load_rotated(
        qkv_ptr, row + (HQ + hk) * D, is_new, position, k_norm_ptr, cos_ptr, sin_ptr, eps, D, DP, HALF, HAS_K_NORM
    )
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
    D: tl.constexpr, DP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, AT_A_TIME: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Weigh the splits' results of one (request, key head) by their sums, several splits at a time."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    s = tl.arange(0, AT_A_TIME)
    is_row = r < GROUP * WIDTH
    row = (first_token + r // GROUP).to(tl.int64) * HQ + hk * GROUP + r % GROUP
    m = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for first in tl.range(0, num_splits, AT_A_TIME):
        cell = (first + s).to(tl.int64)[:, None] * T * HQ + row[None, :]
        is_cell = (first + s < num_splits)[:, None] & is_row[None, :]
        lse = tl.load(lse_ptr + cell, mask=is_cell, other=-1.0e30, cache_modifier=".cg")
        is_real = is_cell[:, :, None] & (d < D)[None, None, :]
        part = tl.load(
            partial_ptr + cell[:, :, None] * D + d[None, None, :], mask=is_real, other=0.0, cache_modifier=".cg"
        )
        new_m = tl.maximum(m, tl.max(lse, 0))
        weight = tl.exp2(lse - new_m[None, :])
        decay = tl.exp2(m - new_m)
        acc = acc * decay[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * decay + tl.sum(weight, 0)
        m = new_m
    joined = acc / total[:, None]
    tl.store(out_ptr + row[:, None] * D + d[None, :], joined.to(dtype), mask=is_row[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["T", "max_pages", "SPLITS", "MIN_TILES"])
def _decode_attention_kernel(
    qkv_ptr, k_cache_ptr, v_cache_ptr, page_table_ptr, request_rows_ptr, seq_lens_ptr, slot_mapping_ptr,
    positions_ptr, query_start_loc_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, tree_mask_ptr, out_ptr, partial_ptr,
    lse_ptr, arrived_ptr, max_pages, T, scale_log2, eps, soft_cap, v_scale, inverse_k_scale, inverse_v_scale, window,
    SPLITS, MIN_TILES,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, NEW: tl.constexpr, BLOCK_N: tl.constexpr, IS_SPLIT: tl.constexpr, JOIN_ROWS: tl.constexpr,
    AT_A_TIME: tl.constexpr, PAGE: tl.constexpr, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_TREE: tl.constexpr, IS_FP8: tl.constexpr,
    IS_MIXED: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
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
    per_split = tl.maximum(tl.cdiv(num_tiles, SPLITS), MIN_TILES)
    num_splits = tl.cdiv(num_tiles, per_split)
    if IS_SPLIT:
        if split >= num_splits:
            if PDL:
                tl.extra.cuda.gdc_wait()
            return
    start = first_tile + split * per_split
    # At least one turn, all masked if need be: the wait and the new tokens are in it.
    stop = tl.maximum(tl.minimum(start + per_split, last_tile), start + 1)
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
            token = first_token + w
            position = tl.load(positions_ptr + token, mask=is_row, other=0)
            if PDL:
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            q_rows = token.to(tl.int64) * ((HQ + 2 * HK) * D) + (hk * GROUP + r % GROUP) * D
            q = load_rotated(
                qkv_ptr, q_rows, is_row, position, q_norm_ptr, cos_ptr, sin_ptr, eps, D, DP, HALF, HAS_Q_NORM
            ).to(dtype)
            if split == num_splits - 1:
                k_new, v_new = _new_tokens(
                    qkv_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, positions_ptr, k_norm_ptr, cos_ptr, sin_ptr,
                    first_token, hk, eps, inverse_k_scale, inverse_v_scale, HQ, HK, D, DP, HALF, WIDTH, NEW, HAS_K_NORM,
                    IS_FP8, dtype,
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
    if num_splits == 1:
        tl.store(out_ptr + row[:, None] * D + d[None, :], result.to(dtype), mask=is_real)
    elif IS_SPLIT:
        rows_before = split.to(tl.int64) * T * HQ
        lse = tl.where(total > 0.0, m + tl.log2(tl.maximum(total, 1.0e-30)), -1.0e30)
        tl.store(partial_ptr + (rows_before + row)[:, None] * D + d[None, :], result, mask=is_real)
        tl.store(lse_ptr + rows_before + row, lse, mask=is_row)
        tl.debug_barrier()  # every thread's part is written before this program says so
        cell_ptr = arrived_ptr + request * HK + hk
        if tl.atomic_add(cell_ptr, 1, sem="acq_rel") == num_splits - 1:
            _join_splits(
                partial_ptr, lse_ptr, out_ptr, first_token, T, hk, num_splits, HQ, GROUP, D, DP, WIDTH, JOIN_ROWS,
                AT_A_TIME, dtype,
            )  # fmt: skip
            tl.store(cell_ptr, 0)  # ready for the next layer


def _flags(layer: AttentionLayer, metadata: DecodeMetadata, k_cache: Tensor) -> dict[str, bool]:
    return {
        "HAS_Q_NORM": layer.q_norm_weight is not None,
        "HAS_K_NORM": layer.k_norm_weight is not None,
        "HAS_WINDOW": layer.sliding_window > 0,
        "HAS_CAP": layer.soft_cap > 0.0,
        "HAS_TREE": metadata.tree_mask is not None,
        "IS_FP8": k_cache.dtype.itemsize == 1,
        "IS_MIXED": metadata.query_start_loc is not None,
    }


def decode_attention(
    qkv: Tensor,
    layer: AttentionLayer,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: DecodeMetadata,
    config: DecodeAttentionConfig | None = None,
) -> Tensor:
    """Normalise, rotate, store and attend a uniform step.

    Args:
        qkv: float [T, (Hq + 2 Hk) * D], contiguous, device; query heads, key heads, value heads.
        layer: what the layer computes.
        k_cache, v_cache: float or float8_e4m3fn [num_pages, page_size, Hk, D]; written at slot_mapping.
        metadata: the step; width at most MAX_QUERY_WIDTH.
        config: launch configuration, or None for the default of these sizes.

    Returns:
        [T, Hq * D], dtype of qkv; memory past a request's seq_len never reaches it.

    In graph: yes. Sync: none.
    """
    check_cache(k_cache, v_cache)
    assert qkv.is_contiguous() and metadata.query_width <= MAX_QUERY_WIDTH
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_q_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if config is None:
        config = select_decode_config(metadata.seq_lens.shape[0], num_kv_heads, head_dim, qkv.device, qkv.dtype)
    out = qkv.new_empty(num_tokens, num_q_heads * head_dim)
    prepare_decode_attention(qkv, layer, (k_cache, v_cache), metadata, config, qkv.device, out).run()
    return out


def attend_single_tokens(
    qkv: Tensor, layer: AttentionLayer, k_cache: Tensor, v_cache: Tensor, metadata: ExtendMetadata, out: Tensor
) -> None:
    """Normalise, rotate, store and attend those requests of a mixed step that have one token.

    Args:
        qkv: float [T, (Hq + 2 Hk) * D], contiguous, device; as the projection made it.
        layer: what the layer computes.
        k_cache, v_cache: float or float8_e4m3fn [num_pages, page_size, Hk, D]; written at slot_mapping.
        metadata: the step.
        out: [T, Hq * D], dtype of qkv; rows of those requests are written.

    In graph: yes. Sync: none.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_requests = metadata.seq_lens.shape[0]
    singles = DecodeMetadata(
        metadata.positions, metadata.slot_mapping, metadata.seq_lens, metadata.request_rows, metadata.page_table,
        query_start_loc=metadata.query_start_loc,
    )  # fmt: skip
    config = select_decode_config(num_requests, num_kv_heads, head_dim, qkv.device, qkv.dtype)
    config = replace(config, num_splits=1)  # a prompt's chunk beside them keeps the card busy
    prepare_decode_attention(qkv, layer, (k_cache, v_cache), singles, config, qkv.device, out).run()


def prepare_decode_attention(
    qkv: Tensor,
    layer: AttentionLayer,
    caches: tuple[Tensor, Tensor],
    metadata: DecodeMetadata,
    config: DecodeAttentionConfig,
    device: torch.device,
    out: Tensor,
) -> runtime.Launch:
    """The launch of the attention kernel proper.

    Args:
        qkv, layer, caches, metadata: as decode_attention; meta tensors do for compiling.
        config: launch configuration.
        device: where it will run.
        out: [T, Hq * D], dtype of qkv.
    """
    k_cache, v_cache = caches
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    num_q_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    width, num_requests = metadata.query_width, metadata.seq_lens.shape[0]
    tables = (layer.cos, layer.sin, layer.q_norm_weight, layer.k_norm_weight, metadata.tree_mask)
    pdl = runtime.use_dependent_launch(device)
    pairs = num_requests * num_kv_heads
    padded_dim = runtime.next_power_of_2(head_dim)
    num_rows = runtime.next_power_of_2(num_q_heads // num_kv_heads * width)
    operands = (
        qkv, k_cache, v_cache, metadata.page_table, metadata.request_rows, metadata.seq_lens, metadata.slot_mapping,
        metadata.positions, _or(metadata.query_start_loc, metadata.seq_lens),
        *(_or(table, qkv) for table in tables), out, *_split_buffers(config, qkv, num_q_heads, head_dim, pairs),
        metadata.page_table.shape[1], qkv.shape[0], layer.scale * LOG2_E * layer.k_scale, layer.norm_eps,
        layer.soft_cap, layer.v_scale, 1.0 / layer.k_scale, 1.0 / layer.v_scale, layer.sliding_window,
        config.num_splits, config.min_tiles,
    )  # fmt: skip
    settings = _flags(layer, metadata, k_cache) | {
        "HQ": num_q_heads,
        "HK": num_kv_heads,
        "D": head_dim,
        "DP": padded_dim,
        "HALF": layer.half_rotary_dim,
        "WIDTH": width,
        "ROWS": max(16, num_rows),
        "NEW": 16,
        "BLOCK_N": config.block_n,
        "IS_SPLIT": config.num_splits > 1,
        "JOIN_ROWS": num_rows,
        "AT_A_TIME": max(1, _JOINED_VALUES // (num_rows * padded_dim)),
        "PAGE": page_size,
        "STAGES": config.num_stages,
        "PDL": pdl,
        "num_warps": config.num_warps,
        "launch_pdl": pdl,
    }
    grid = (config.num_splits, num_kv_heads, num_requests)
    return runtime.Launch(_decode_attention_kernel, grid, operands, settings)


def _split_buffers(
    config: DecodeAttentionConfig, qkv: Tensor, num_q_heads: int, head_dim: int, pairs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Results of the splits float32 [splits, T, Hq, D], their log-sums [splits, T, Hq], counters of arrivals."""
    if config.num_splits == 1:
        return qkv, qkv, qkv
    size = config.num_splits, qkv.shape[0], num_q_heads
    partial = qkv.new_empty(*size, head_dim, dtype=torch.float32)
    return partial, qkv.new_empty(size, dtype=torch.float32), runtime.arrival_counters(qkv.device, pairs)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer to pass for an operand the kernel's flags say it does not read."""
    return other if tensor is None else tensor
