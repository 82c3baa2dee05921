"""Attention of any mix of prompt chunks and decode rows: the decode kernel for requests of one token, then rope and KV
store over tokens and a flash pass for the rest.

The grid depends only on the padded counts of a graph key: at most T / tile + R tiles of queries; each program finds
its request in query_start_loc itself, so no tile map is prepared by the host.
A tile packs BLOCK_TOKENS tokens times the query heads of one key head, so grouped heads share each key load.
Twin: reference.rope_store_attention. Source: FlashAttention-2 (Dao 2023), its loop order and running softmax.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.attention_common import (
    LOG2_E,
    AttentionLayer,
    ExtendMetadata,
    masked_scores,
    softmax_step,
)
from graphrunner.kernels.triton.decode_attention import attend_single_tokens
from graphrunner.kernels.triton.rope_store import rope_store

FIXED_TILE_ROWS = 64
"""Of steps whose tiles must not depend on their size: as many as a prompt's tile has, and many for a decode row."""


@dataclass(frozen=True, slots=True)
class ExtendConfig:
    """Launch configuration of the flash pass.

    Attributes:
        num_rows: rows a tile, tokens times grouped heads.
        block_n: keys a tile.
        num_warps, num_stages: of the launch and of the ring of loads.
        reads_step: a token finds the keys and values of its own step in qkv, through a tensor descriptor, and only
            earlier ones in pages.
    """

    num_rows: int
    block_n: int
    num_warps: int
    num_stages: int
    reads_step: bool = False


@triton.jit
def _request_of_tile(query_start_loc_ptr, R, tile, TOKENS: tl.constexpr, BLOCK_R: tl.constexpr):
    """The request of a tile: request r has the tiles from query_start_loc[r] / TOKENS + r on, rounded down.

    That is at least as many as its tokens fill; those past them have nothing to do. No sum over requests is needed.
    """
    i = tl.arange(0, BLOCK_R)
    is_real = i < R
    start = tl.load(query_start_loc_ptr + i, mask=is_real, other=0)
    return tl.sum((is_real & (start // TOKENS + i <= tile)).to(tl.int32), 0) - 1


@triton.jit
def _settled(acc):
    """acc, and a use of it that makes the compiler wait for its product here.

    A product in flight across the end of a loop meets the copies that join loops there; the assembler then waits after
    every single instruction of every product (its C7515). That halved this kernel's rate.
    """
    return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _attend_tiles(
    q, k_cache_ptr, v_cache_ptr, table_row_ptr, step_desc, step_row, hk, position, is_row, first, last, num_keys,
    scale_log2, soft_cap, window, m, total, acc, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    NEEDS_MASK: tl.constexpr, FROM_STEP: tl.constexpr, STAGES: tl.constexpr, IS_ASYNC: tl.constexpr,
):  # fmt: skip
    """Attend the tiles [first, last) of num_keys keys; NEEDS_MASK false only where every row sees every key.

    FROM_STEP: keys and values are rows of this step's qkv from step_row on, and position counts from there; otherwise
    they are in pages.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, DP)
    for t in tl.range(first, last, num_stages=STAGES):
        o = t * BLOCK_N + n
        is_key = o < num_keys
        if FROM_STEP:
            row = step_row + t * BLOCK_N
            k = step_desc.load([row, (HQ + hk) * D])
            v = step_desc.load([row, (HQ + HK + hk) * D])
            if NEEDS_MASK:
                v = tl.where(is_key[:, None], v, 0.0)  # past the end are another request's: nothing times NaN is NaN
        else:
            page = tl.load(table_row_ptr + o // PAGE, mask=is_key, other=0).to(tl.int64)
            offsets = (((page * PAGE + o % PAGE) * HK + hk) * D)[:, None] + d[None, :]
            is_real = is_key[:, None] & (d < D)[None, :]
            k = tl.load(k_cache_ptr + offsets, mask=is_real, other=0.0).to(q.dtype)
            v = tl.load(v_cache_ptr + offsets, mask=is_real, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if NEEDS_MASK or HAS_CAP:
            is_visible = is_row[:, None] & (o[None, :] <= position[:, None]) & is_key[None, :]
            if HAS_WINDOW:
                is_visible = is_visible & (o[None, :] > (position - window)[:, None])
            scores = masked_scores(scores, is_visible, scale_log2, soft_cap, HAS_CAP)
            m, total, acc = softmax_step(scores, is_visible, v, m, total, acc)
        else:
            new_m = tl.maximum(m, tl.max(scores, 1) * scale_log2)  # the scale is positive
            p = tl.exp2(scores * scale_log2 - new_m[:, None])
            decay = tl.exp2(m - new_m)
            acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
            total = total * decay + tl.sum(p, 1)
            m = new_m
        if IS_ASYNC:
            acc = _settled(acc)
    return m, total, acc


@triton.jit
def _attend_keys(
    q, k_cache_ptr, v_cache_ptr, table_row_ptr, step_desc, step_row, hk, position, is_row, first_position, num_keys,
    scale_log2, soft_cap, window, m, total, acc, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    FIXED: tl.constexpr, FROM_STEP: tl.constexpr, STAGES: tl.constexpr, IS_ASYNC: tl.constexpr,
):  # fmt: skip
    """Attend num_keys keys: tiles that every row sees whole without a mask, then the rest.

    first_position: of the tile's first row, which sees the fewest keys.
    FIXED: which keys need no mask depends on the chunk, and their arithmetic is fused otherwise: all are masked.
    """
    if FIXED and not HAS_WINDOW:
        split = 0
    elif HAS_WINDOW:
        split = tl.minimum(tl.maximum(first_position - window + 1, 0), num_keys) // BLOCK_N
    else:
        split = tl.minimum(first_position + 1, num_keys) // BLOCK_N
        m, total, acc = _attend_tiles(
            q, k_cache_ptr, v_cache_ptr, table_row_ptr, step_desc, step_row, hk, position, is_row, 0, split, num_keys,
            scale_log2, soft_cap, window, m, total, acc, HQ, HK, D, DP, BLOCK_N, PAGE, False, HAS_CAP, False,
            FROM_STEP, STAGES, IS_ASYNC,
        )  # fmt: skip
    return _attend_tiles(
        q, k_cache_ptr, v_cache_ptr, table_row_ptr, step_desc, step_row, hk, position, is_row, split,
        tl.cdiv(num_keys, BLOCK_N), num_keys, scale_log2, soft_cap, window, m, total, acc, HQ, HK, D, DP, BLOCK_N,
        PAGE, HAS_WINDOW, HAS_CAP, True, FROM_STEP, STAGES, IS_ASYNC,
    )  # fmt: skip


@triton.jit(do_not_specialize=["R", "least_len"])
def _extend_attention_kernel(
    qkv_ptr, step_desc, k_cache_ptr, v_cache_ptr, page_table_ptr, request_rows_ptr, seq_lens_ptr, query_start_loc_ptr,
    out_ptr, max_pages, R, least_len, scale_log2, soft_cap, v_scale, window, HQ: tl.constexpr, HK: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    FIXED: tl.constexpr, FROM_STEP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HQ // HK
    hk = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Long tiles first: the last tiles of a prompt see the most keys.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    request = _request_of_tile(query_start_loc_ptr, R, tile, TOKENS, BLOCK_R)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    first_query = (tile - query_start // TOKENS - request) * TOKENS
    if (first_query < query_len) & (query_len >= least_len):
        seq_len = tl.load(seq_lens_ptr + request)
        table_row_ptr = page_table_ptr + tl.load(request_rows_ptr + request).to(tl.int64) * max_pages
        r = tl.arange(0, TOKENS * GP)
        d = tl.arange(0, DP)
        query = first_query + r // GP
        is_row = (query < query_len) & (r % GP < GROUP)
        prefix_len = seq_len - query_len
        head = hk * GROUP + r % GP
        token = (query_start + query).to(tl.int64)
        is_real = is_row[:, None] & (d < D)[None, :]
        q_offsets = (token * (HQ + 2 * HK) + head)[:, None] * D + d[None, :]
        q = tl.load(qkv_ptr + q_offsets, mask=is_real, other=0.0)
        num_own_keys = tl.minimum(first_query + TOKENS, query_len)
        m = tl.full([TOKENS * GP], -1.0e30, tl.float32)
        total = tl.zeros([TOKENS * GP], tl.float32)
        acc = tl.zeros([TOKENS * GP, DP], tl.float32)
        num_paged_keys = prefix_len if FROM_STEP else prefix_len + num_own_keys
        m, total, acc = _attend_keys(
            q, k_cache_ptr, v_cache_ptr, table_row_ptr, step_desc, query_start, hk, prefix_len + query, is_row,
            prefix_len + first_query, num_paged_keys, scale_log2, soft_cap, window, m, total, acc, HQ, HK, D, DP,
            BLOCK_N, PAGE, HAS_WINDOW, HAS_CAP, FIXED, False, STAGES, PDL,
        )  # fmt: skip
        if FROM_STEP:
            m, total, acc = _attend_keys(
                q, k_cache_ptr, v_cache_ptr, table_row_ptr, step_desc, query_start, hk, query, is_row, first_query,
                num_own_keys, scale_log2, soft_cap, window, m, total, acc, HQ, HK, D, DP, BLOCK_N, PAGE, HAS_WINDOW,
                HAS_CAP, FIXED, True, STAGES, PDL,
            )  # fmt: skip
        result = acc * (v_scale / tl.maximum(total, 1.0e-30))[:, None]
        out_offsets = (token * HQ + head)[:, None] * D + d[None, :]
        tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=is_real)


def extend_attention(
    qkv: Tensor,
    layer: AttentionLayer,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: ExtendMetadata,
    config: ExtendConfig | None = None,
) -> Tensor:
    """Normalise, rotate, store and attend any mix of prompt chunks and decode rows.

    Args:
        qkv: float [T, (Hq + 2 Hk) * D], contiguous, device; its query and key heads are overwritten.
        layer: what the layer computes.
        k_cache, v_cache: float or float8_e4m3fn [num_pages, page_size, Hk, D]; written at slot_mapping.
        metadata: the step; requests without queries and tokens past query_start_loc[-1] are padding.
        config: launch configuration of the flash pass, or None for the default of these sizes.

    Returns:
        [T, Hq * D], dtype of qkv; rows of padding tokens are zero.

    In graph: yes. Sync: none.
    """
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = k_cache.shape[2:]
    out = qkv.new_empty(num_tokens, qkv.shape[1] - 2 * num_kv_heads * head_dim)
    if num_tokens == 0:
        return out
    if _has_singles(metadata):
        attend_single_tokens(qkv, layer, k_cache, v_cache, metadata, out)
    config = config or default_extend_config(qkv, k_cache, metadata.has_fixed_tiles)
    rope_store(qkv, layer, k_cache, v_cache, metadata, out, config.reads_step)
    prepare_extend_attention(qkv, layer, (k_cache, v_cache), metadata, config, qkv.device, out).run()
    return out


def _has_singles(metadata: ExtendMetadata) -> bool:
    """Whether requests of one token go to the decode kernel; a graph key fixes it."""
    return metadata.seq_lens.shape[0] > 1 and not metadata.has_fixed_tiles


def default_extend_config(qkv: Tensor, k_cache: Tensor, has_fixed_tiles: bool = False) -> ExtendConfig:
    """Tiles for these sizes; with fixed tiles they do not depend on the number of tokens."""
    num_tokens, head_dim = qkv.shape[0], k_cache.shape[3]
    is_small = qkv.dtype.itemsize == 2 and runtime.next_power_of_2(head_dim) <= 128
    if not is_small:
        return ExtendConfig(16, 32, 4, 2)
    num_stages = 3 if head_dim <= 64 else 2
    if has_fixed_tiles:
        return ExtendConfig(FIXED_TILE_ROWS, 64, 4, num_stages)
    if num_tokens <= 64:
        return ExtendConfig(16, 64, 4, num_stages)
    # Measured on an H200 at head size 128: the smaller tile puts three programs on a multiprocessor, not two.
    block_n = 64 if head_dim <= 64 else 32
    is_stored_as_it_is = k_cache.dtype == qkv.dtype and head_dim == runtime.next_power_of_2(head_dim)
    reads_step = is_stored_as_it_is and runtime.has_tensor_descriptors(qkv.device)
    return ExtendConfig(64, block_n, 4, 3, reads_step=reads_step)


def prepare_extend_attention(
    qkv: Tensor,
    layer: AttentionLayer,
    caches: tuple[Tensor, Tensor],
    metadata: ExtendMetadata,
    config: ExtendConfig,
    device: torch.device,
    out: Tensor,
) -> runtime.Launch:
    """The launch of the flash pass, over rotated queries and stored keys; one request of one token is a prompt too.

    Args:
        qkv, layer, caches, metadata: as extend_attention; meta tensors do for compiling.
        config: launch configuration.
        device: where it will run.
        out: [T, Hq * D].
    """
    num_tokens, num_requests = qkv.shape[0], metadata.seq_lens.shape[0]
    _, page_size, num_kv_heads, head_dim = caches[0].shape
    num_q_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    padded_group = runtime.next_power_of_2(num_q_heads // num_kv_heads)
    num_rows = max(config.num_rows, padded_group)
    tokens_per_tile = num_rows // padded_group
    pdl = runtime.use_dependent_launch(device)
    step = TensorDescriptor.from_tensor(qkv, [config.block_n, head_dim]) if config.reads_step else qkv
    operands = (
        qkv, step, *caches, metadata.page_table, metadata.request_rows, metadata.seq_lens, metadata.query_start_loc,
        out, metadata.page_table.shape[1], num_requests, 2 if _has_singles(metadata) else 1,
        layer.scale * LOG2_E * layer.k_scale, layer.soft_cap, layer.v_scale, layer.sliding_window,
    )  # fmt: skip
    settings = {
        "HQ": num_q_heads,
        "HK": num_kv_heads,
        "D": head_dim,
        "DP": runtime.next_power_of_2(head_dim),
        "GP": padded_group,
        "TOKENS": tokens_per_tile,
        "BLOCK_N": config.block_n,
        "BLOCK_R": 32 if num_requests <= 32 else max(256, runtime.next_power_of_2(num_requests)),  # few variants
        "PAGE": page_size,
        "HAS_WINDOW": layer.sliding_window > 0,
        "HAS_CAP": layer.soft_cap > 0.0,
        "FIXED": metadata.has_fixed_tiles,
        "FROM_STEP": config.reads_step,
        "STAGES": config.num_stages,
        "PDL": pdl,
        "num_warps": config.num_warps if num_rows == config.num_rows else 4,
        "launch_pdl": pdl,
        # This kernel is compiled anew for a larger batch: nothing may be left for a compiler to fuse or not.
        "enable_fp_fusion": not metadata.has_fixed_tiles,
    }
    grid = (runtime.cdiv(num_tokens, tokens_per_tile) + num_requests, num_kv_heads)
    return runtime.Launch(_extend_attention_kernel, grid, operands, settings)
