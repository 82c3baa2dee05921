"""Rope of a step's queries and keys and the store of its keys and values, for the flash pass that follows.

Twin: the first half of reference.rope_store_attention.
"""

import triton
import triton.language as tl
from torch import Tensor

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.attention_common import (
    AttentionLayer,
    ExtendMetadata,
    check_cache,
    load_rotated,
    to_cache,
)


@triton.jit(do_not_specialize=["R"])
def _rope_store_kernel(
    qkv_ptr, k_cache_ptr, v_cache_ptr, positions_ptr, slot_mapping_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    query_start_loc_ptr, out_ptr, R, eps, inverse_k_scale, inverse_v_scale, HQ: tl.constexpr, HK: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, HQP: tl.constexpr, HKP: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, IS_FP8: tl.constexpr, KEEPS_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token a program: rotate q in place, rotate and store k, store v; a padding token's result is zero."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row_ptr = qkv_ptr + token * ((HQ + 2 * HK) * D)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slot_mapping_ptr + token)
    h = tl.arange(0, HQP)
    q = load_rotated(
        row_ptr, h * D, h < HQ, tl.zeros([HQP], tl.int64) + position, q_norm_ptr, cos_ptr, sin_ptr, eps, D, DP, HALF,
        HAS_Q_NORM,
    )  # fmt: skip
    # Each head's partner channels are read by other threads of this program: all reads come before the first write.
    tl.debug_barrier()
    is_q = (h < HQ)[:, None] & (d < D)[None, :]
    if token >= tl.load(query_start_loc_ptr + R):
        zero = tl.zeros([HQP, DP], out_ptr.dtype.element_ty)
        tl.store(out_ptr + (token * HQ + h)[:, None] * D + d[None, :], zero, mask=is_q)
    tl.store(row_ptr + h[:, None] * D + d[None, :], q.to(qkv_ptr.dtype.element_ty), mask=is_q)
    hk = tl.arange(0, HKP)
    k = load_rotated(
        row_ptr, (HQ + hk) * D, hk < HK, tl.zeros([HKP], tl.int64) + position, k_norm_ptr, cos_ptr, sin_ptr, eps, D,
        DP, HALF, HAS_K_NORM,
    )  # fmt: skip
    is_k = (hk < HK)[:, None] & (d < D)[None, :]
    if KEEPS_KEYS:
        tl.debug_barrier()
        tl.store(row_ptr + (HQ + hk)[:, None] * D + d[None, :], k.to(qkv_ptr.dtype.element_ty), mask=is_k)
    v = tl.load(row_ptr + (HQ + HK + hk)[:, None] * D + d[None, :], mask=is_k, other=0.0).to(tl.float32)
    cache_dtype: tl.constexpr = k_cache_ptr.dtype.element_ty
    offsets = (slot * HK + hk)[:, None] * D + d[None, :]
    tl.store(k_cache_ptr + offsets, to_cache(k, inverse_k_scale, cache_dtype, IS_FP8), mask=is_k)
    tl.store(v_cache_ptr + offsets, to_cache(v, inverse_v_scale, cache_dtype, IS_FP8), mask=is_k)


def rope_store(
    qkv: Tensor,
    layer: AttentionLayer,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: ExtendMetadata,
    out: Tensor,
    keeps_keys: bool = False,
) -> None:
    """Normalise and rotate the query heads in place; normalise, rotate and store keys; store values.

    Args:
        qkv: float [T, (Hq + 2 Hk) * D], contiguous, device; its query heads are overwritten.
        layer: what the layer computes.
        k_cache, v_cache: float or float8_e4m3fn [num_pages, page_size, Hk, D]; written at slot_mapping.
        metadata: the step.
        out: [T, Hq * D], dtype of qkv; where attention will put its result. Rows of padding tokens become zero.
        keeps_keys: whether the key heads of qkv are overwritten too, by what is stored.

    In graph: yes. Sync: none.
    """
    check_cache(k_cache, v_cache)
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_q_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if qkv.shape[0] == 0:
        return
    assert qkv.is_contiguous()
    pdl = runtime.use_dependent_launch(qkv.device)
    tables = (layer.cos, layer.sin, layer.q_norm_weight, layer.k_norm_weight)
    runtime.launch(
        _rope_store_kernel, (qkv.shape[0],),
        qkv, k_cache, v_cache, metadata.positions, metadata.slot_mapping,
        *(qkv if table is None else table for table in tables),
        metadata.query_start_loc, out, metadata.seq_lens.shape[0],
        layer.norm_eps, 1.0 / layer.k_scale, 1.0 / layer.v_scale, HQ=num_q_heads, HK=num_kv_heads, D=head_dim,
        DP=runtime.next_power_of_2(head_dim), HALF=layer.half_rotary_dim, HQP=runtime.next_power_of_2(num_q_heads),
        HKP=runtime.next_power_of_2(num_kv_heads), HAS_Q_NORM=layer.q_norm_weight is not None,
        HAS_K_NORM=layer.k_norm_weight is not None, IS_FP8=k_cache.dtype.itemsize == 1,
        KEEPS_KEYS=keeps_keys, PDL=pdl, num_warps=4, launch_pdl=pdl, enable_fp_fusion=not metadata.has_fixed_tiles,
    )  # fmt: skip
