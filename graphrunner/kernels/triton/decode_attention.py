"""Paged attention of a uniform step (decode, or verify at width 2 to 8): one kernel from qkv to the heads' output.

A program owns one (request, key head, split of the sequence). It fills its ring of key and value tiles before the
projection that makes qkv has finished (see linear_kernels, Note [weights before wait]): cached tokens depend on no
kernel of this layer. The last split also normalises, rotates and stores the step's own keys and values.
The number of splits is fixed by the batch size, so the grid is static inside a graph; the tiles of a sequence are
shared out at run time whatever its length.
Twin: reference.rope_store_attention. Source: split-KV decoding as in Flash-Decoding (Dao et al. 2023).
"""

from dataclasses import dataclass, replace

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
from graphrunner.kernels.triton.tuned_configs import TUNED_ATTENTION

MAX_QUERY_WIDTH = 8
_MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class DecodeAttentionConfig:
    """Launch configuration: splits of the sequence, tokens a tile, warps, ring depth."""

    num_splits: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 3


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


@triton.jit(do_not_specialize=["T", "max_pages", "SPLITS"])
def _decode_attention_kernel(
    qkv_ptr, k_cache_ptr, v_cache_ptr, page_table_ptr, request_rows_ptr, seq_lens_ptr, slot_mapping_ptr,
    positions_ptr, query_start_loc_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, tree_mask_ptr, out_ptr, lse_ptr,
    max_pages, T,
    scale_log2, eps, soft_cap, v_scale, inverse_k_scale, inverse_v_scale, window, SPLITS,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, NEW: tl.constexpr, BLOCK_N: tl.constexpr, IS_SPLIT: tl.constexpr, PAGE: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_TREE: tl.constexpr, IS_FP8: tl.constexpr, IS_MIXED: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
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
    per_split = tl.cdiv(tl.maximum(last_tile - first_tile, 0), SPLITS)
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
            if split == SPLITS - 1:
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
    row = (split * T + first_token + w).to(tl.int64) * HQ + hk * GROUP + r % GROUP
    result = acc * (v_scale / tl.maximum(total, 1.0e-30))[:, None]
    tl.store(
        out_ptr + row[:, None] * D + d[None, :], result.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (d < D)[None, :],
    )  # fmt: skip
    if IS_SPLIT:
        lse = tl.where(total > 0.0, m + tl.log2(tl.maximum(total, 1.0e-30)), -1.0e30)
        tl.store(lse_ptr + row, lse, mask=is_row)


@triton.jit(do_not_specialize=["num_heads"])
def _combine_kernel(
    partial_ptr, lse_ptr, out_ptr, num_heads, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr,
    SP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Join the splits of one (token, head).

    Like a norm (norms._rms_norm_kernel) it lets its successor start before its own wait, and for the same reason: the
    output projection behind it fetches weights while attention still runs.
    """
    i = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SP)
    d = tl.arange(0, DP)
    is_split = s < SPLITS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    lse = tl.load(lse_ptr + s * num_heads + i, mask=is_split, other=-1.0e30)
    part = tl.load(
        partial_ptr + (s.to(tl.int64) * num_heads + i)[:, None] * D + d[None, :],
        mask=is_split[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    weight = tl.where(is_split, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    joined = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + i * D + d, joined.to(out_ptr.dtype.element_ty), mask=d < D)


def default_decode_config(
    num_requests: int, num_kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> DecodeAttentionConfig:
    """Splits that fill the card about twice, from sizes a graph key fixes; tiles that leave room for two programs."""
    num_splits = _num_splits(2 * runtime.num_multiprocessors(device), num_requests * num_kv_heads)
    padded_dim = runtime.next_power_of_2(head_dim)
    block_n = max(16, min(128 if padded_dim <= 64 else 64, 8192 // padded_dim) // (2 if dtype.itemsize == 4 else 1))
    return DecodeAttentionConfig(num_splits, block_n)


def attention_key(num_requests: int, num_kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> str:
    """Name of one entry of the table of measured configurations; requests are bucketed by powers of four."""
    bucket = next((size for size in (1, 4, 16, 64) if num_requests <= size), 256)
    return f"{runtime.device_key(device)}/{dtype.itemsize * 8}bit/{num_kv_heads}x{head_dim}/requests{bucket}"


def select_decode_config(
    num_requests: int, num_kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> DecodeAttentionConfig:
    """The measured tiles for these sizes, else the default; the splits always follow from the sizes themselves."""
    default = default_decode_config(num_requests, num_kv_heads, head_dim, device, dtype)
    row = TUNED_ATTENTION.get(attention_key(num_requests, num_kv_heads, head_dim, device, dtype))
    if row is None:
        return default
    programs_per_multiprocessor, block_n, num_warps, num_stages = row
    pairs = num_requests * num_kv_heads
    num_splits = _num_splits(programs_per_multiprocessor * runtime.num_multiprocessors(device), pairs)
    return DecodeAttentionConfig(num_splits, block_n, num_warps, num_stages)


def _num_splits(num_programs: float, pairs: int) -> int:
    """The largest power of two that keeps the grid within num_programs."""
    num_splits = 1
    while num_splits * 2 * pairs <= num_programs and num_splits < _MAX_SPLITS:
        num_splits *= 2
    return num_splits


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
    if config.num_splits == 1:
        prepare_decode_attention(qkv, layer, (k_cache, v_cache), metadata, config, qkv.device, (out, out)).run()
        return out
    partial = qkv.new_empty(config.num_splits, num_tokens, num_q_heads, head_dim, dtype=torch.float32)
    lse = qkv.new_empty(config.num_splits, num_tokens, num_q_heads, dtype=torch.float32)
    prepare_decode_attention(qkv, layer, (k_cache, v_cache), metadata, config, qkv.device, (partial, lse)).run()
    num_heads = num_tokens * num_q_heads
    pdl = runtime.use_dependent_launch(qkv.device)
    runtime.launch(
        _combine_kernel, (num_heads,),
        partial, lse, out, num_heads, D=head_dim, DP=runtime.next_power_of_2(head_dim), SPLITS=config.num_splits,
        SP=runtime.next_power_of_2(config.num_splits), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
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
    prepare_decode_attention(qkv, layer, (k_cache, v_cache), singles, config, qkv.device, (out, out)).run()


def prepare_decode_attention(
    qkv: Tensor,
    layer: AttentionLayer,
    caches: tuple[Tensor, Tensor],
    metadata: DecodeMetadata,
    config: DecodeAttentionConfig,
    device: torch.device,
    outputs: tuple[Tensor, Tensor],
) -> runtime.Launch:
    """The launch of the attention kernel proper.

    Args:
        qkv, layer, caches, metadata: as decode_attention; meta tensors do for compiling.
        config: launch configuration.
        device: where it will run.
        outputs: the result twice for one split, else float32 partials [splits, T, Hq, D] and their log-sums
            [splits, T, Hq].
    """
    k_cache, v_cache = caches
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    num_q_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    width, num_requests = metadata.query_width, metadata.seq_lens.shape[0]
    tables = (layer.cos, layer.sin, layer.q_norm_weight, layer.k_norm_weight, metadata.tree_mask)
    pdl = runtime.use_dependent_launch(device)
    operands = (
        qkv, k_cache, v_cache, metadata.page_table, metadata.request_rows, metadata.seq_lens, metadata.slot_mapping,
        metadata.positions, _or(metadata.query_start_loc, metadata.seq_lens),
        *(_or(table, qkv) for table in tables), *outputs, metadata.page_table.shape[1],
        qkv.shape[0], layer.scale * LOG2_E * layer.k_scale, layer.norm_eps, layer.soft_cap, layer.v_scale,
        1.0 / layer.k_scale, 1.0 / layer.v_scale, layer.sliding_window, config.num_splits,
    )  # fmt: skip
    settings = _flags(layer, metadata, k_cache) | {
        "HQ": num_q_heads,
        "HK": num_kv_heads,
        "D": head_dim,
        "DP": runtime.next_power_of_2(head_dim),
        "HALF": layer.half_rotary_dim,
        "WIDTH": width,
        "ROWS": max(16, runtime.next_power_of_2(num_q_heads // num_kv_heads * width)),
        "NEW": 16,
        "BLOCK_N": config.block_n,
        "IS_SPLIT": config.num_splits > 1,
        "PAGE": page_size,
        "STAGES": config.num_stages,
        "PDL": pdl,
        "num_warps": config.num_warps,
        "launch_pdl": pdl,
    }
    grid = (config.num_splits, num_kv_heads, num_requests)
    return runtime.Launch(_decode_attention_kernel, grid, operands, settings)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer to pass for an operand the kernel's flags say it does not read."""
    return other if tensor is None else tensor
