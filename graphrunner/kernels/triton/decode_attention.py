"""Paged attention of a uniform step (decode, or verify at width 2 to 8): one kernel from qkv to the heads' output.

A program owns one (request, key head, split of the sequence). It fills its ring of key and value tiles before the
projection that makes qkv has finished (see linear_kernels, Note [weights before wait]): cached tokens depend on no
kernel of this layer. The last split also normalises, rotates and stores the step's own keys and values.
The grid is fixed by the batch size, so that it is static inside a graph; the tiles of a sequence are shared out at run
time, to fewer programs where it is short.
Twin: reference.rope_store_attention. Source: see decode_attention_kernel.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.attention_common import (
    LOG2_E,
    AttentionLayer,
    DecodeMetadata,
    ExtendMetadata,
    check_cache,
)
from graphrunner.kernels.triton.decode_attention_config import DecodeAttentionConfig, select_decode_config
from graphrunner.kernels.triton.decode_attention_kernel import combine_kernel, decode_attention_kernel

MAX_QUERY_WIDTH = 8
_JOINED_VALUES = 4096
"""Numbers the last arriver can join at once: 64 registers a thread where there are two warps."""
_FEW_REQUESTS = 4
"""With so few, a kernel of its own joins splits sooner: see docs/decisions/0008-splits-of-attention.md."""


@dataclass(frozen=True, slots=True)
class _Splits:
    """What the programs of a sequence leave for who joins them; any tensor where a sequence has one program.

    Attributes:
        results: float32 [splits, T, Hq, D].
        log_sums: float32 [splits, T, Hq].
    """

    results: Tensor
    log_sums: Tensor

    @classmethod
    def of(cls, config: DecodeAttentionConfig, qkv: Tensor, num_q_heads: int, head_dim: int) -> "_Splits":
        if config.num_splits == 1:
            return cls(qkv, qkv)
        size = config.num_splits, qkv.shape[0], num_q_heads
        results = qkv.new_empty(*size, head_dim, dtype=torch.float32)
        return cls(results, qkv.new_empty(size, dtype=torch.float32))


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
        num_requests, width = metadata.seq_lens.shape[0], metadata.query_width
        config = select_decode_config(num_requests, num_kv_heads, head_dim, qkv.device, qkv.dtype, width)
    out = qkv.new_empty(num_tokens, num_q_heads * head_dim)
    for launch in prepare_decode_attention(qkv, layer, (k_cache, v_cache), metadata, config, qkv.device, out):
        launch.run()
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
    (launch,) = prepare_decode_attention(qkv, layer, (k_cache, v_cache), singles, config, qkv.device, out)
    launch.run()


def prepare_decode_attention(
    qkv: Tensor,
    layer: AttentionLayer,
    caches: tuple[Tensor, Tensor],
    metadata: DecodeMetadata,
    config: DecodeAttentionConfig,
    device: torch.device,
    out: Tensor,
) -> tuple[runtime.Launch, ...]:
    """The attention kernel, and behind it the one that joins splits where the last arriver does not.

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
    padded_dim = runtime.next_power_of_2(head_dim)
    num_rows = runtime.next_power_of_2(num_q_heads // num_kv_heads * width)
    splits = _Splits.of(config, qkv, num_q_heads, head_dim)
    fits = config.num_splits * num_rows * padded_dim <= _JOINED_VALUES
    joins = config.num_splits > 1 and num_requests > _FEW_REQUESTS and fits
    arrived = runtime.arrival_counters(qkv.device, num_requests * num_kv_heads) if joins else qkv
    operands = (
        qkv, k_cache, v_cache, metadata.page_table, metadata.request_rows, metadata.seq_lens, metadata.slot_mapping,
        metadata.positions, _or(metadata.query_start_loc, metadata.seq_lens),
        *(_or(table, qkv) for table in tables), out, splits.results, splits.log_sums, arrived,
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
        "JOINS": joins,
        "JOIN_ROWS": num_rows if joins else 1,
        "SP": config.num_splits if joins else 1,
        "PAGE": page_size,
        "ANGLE_BYTES": str(layer.half_rotary_dim * 4 // 16 * 16 if pdl else 0),
        "STAGES": config.num_stages,
        "PDL": pdl,
        "num_warps": config.num_warps,
        "launch_pdl": pdl,
    }
    grid = (config.num_splits, num_kv_heads, num_requests)
    attention = runtime.Launch(decode_attention_kernel, grid, operands, settings)
    if config.num_splits == 1 or joins:
        return (attention,)
    num_heads = qkv.shape[0] * num_q_heads
    combined = (splits.results, splits.log_sums, out, num_heads)
    sizes = {"D": head_dim, "DP": padded_dim, "SPLITS": config.num_splits}
    return attention, runtime.Launch(
        combine_kernel, (num_heads,), combined, sizes | {"PDL": pdl, "num_warps": 4, "launch_pdl": pdl}
    )


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer to pass for an operand the kernel's flags say it does not read."""
    return other if tensor is None else tensor
