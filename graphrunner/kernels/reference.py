"""Plain torch twins of every kernel: the oracle of the tests and the fallback of every device.

Shape legend: T tokens of the step, R requests of the step, K input width, N output width, H heads, Hq query heads,
Hk key/value heads, D head_dim, S key positions a page-table row can address (max_pages * page_size).

Obvious before fast. Nothing here reads a tensor's value on the host, so torch.compile and torch.export trace through.
Masked memory is always *selected* away, never multiplied by zero: a NaN in memory nobody owns reaches no result.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from graphrunner.kernels.batch_invariance import is_batch_invariant

_FP8_MAX = 448.0  # the largest float8_e4m3fn
_TOKENS_PER_CHUNK = 64  # bounds the gathered keys of the attention twin to 64 * S * Hk * D elements


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Divide each row by its root mean square, in float32.

    Args:
        x: float [..., K].
        weight: float32 [K], or None for a norm without a learned scale. Gemma's "1 + w" is folded in at load.
        eps: added to the mean square.

    Returns:
        Same dtype and shape as x.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.float()
    return normed.to(x.dtype)


def dequantize_int8(data: Tensor, scale: Tensor) -> Tensor:
    """Widen an int8 weight.

    Args:
        data: int8 [N, K].
        scale: float32 [N] (one per output row) or [N, num_groups] (num_groups divides K).

    Returns:
        float32 [N, K].
    """
    num_rows, width = data.shape
    groups = scale.reshape(num_rows, -1, 1)
    return (data.float().reshape(num_rows, groups.shape[1], -1) * groups).reshape(num_rows, width)


def norm_linear(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Project the normalised rows: rms_norm(x) @ weight.T + bias.

    Args:
        x: float [T, K].
        norm_weight: float32 [K]; None means no normalisation at all.
        weight: float [N, K].
        bias: float [N] or None.

    Returns:
        [T, N], dtype of x.
    """
    hidden = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    return F.linear(hidden, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def norm_gate_up(x: Tensor, norm_weight: Tensor | None, eps: float, gate_up_weight: Tensor, activation: str) -> Tensor:
    """First half of a gated MLP: act(gate) * up of the normalised rows.

    Args:
        x: float [T, K].
        norm_weight: float32 [K]; None means no normalisation at all.
        gate_up_weight: float [2N, K]; the first N rows are the gate, the others the up projection.
        activation: "silu" or "gelu_tanh".

    Returns:
        [T, N], dtype of x.
    """
    return gate_mul(norm_linear(x, norm_weight, eps, gate_up_weight), activation)


def gate_mul(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up: float [T, 2N] -> [T, N]; the first N columns are the gate. Activation as in norm_gate_up."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated * up


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Project and add the residual stream: residual + x @ weight.T + bias.

    Args:
        x: float [T, K].
        weight: float [N, K].
        bias: float [N] or None.
        residual: float [T, N].

    Returns:
        [T, N], dtype of residual.
    """
    return residual + norm_linear(x, None, 0.0, weight, bias)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[1] channels of each head, split-half layout.

    Args:
        x: float [T, H, D].
        cos, sin: float32 [max_pos, rotary_dim / 2]; rotary_dim <= D, the channels past it pass through.
        positions: int64 [T].

    Returns:
        Same dtype and shape as x.

    Source: RoFormer (Su et al. 2021), in the split-half arrangement of GPT-NeoX and Llama checkpoints.
    """
    half = cos.shape[1]
    c = cos[positions].unsqueeze(1)
    s = sin[positions].unsqueeze(1)
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    rotated = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write this step's keys and values into their slots, in place.

    Args:
        k, v: float [T, Hk, D].
        k_cache, v_cache: float or float8_e4m3fn [num_pages, page_size, Hk, D].
        slot_mapping: int64 [T]; page * page_size + offset. Padding tokens name a slot of page 0.
        k_scale, v_scale: what a stored fp8 number is multiplied by.
    """
    for values, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        _bits(cache).view(-1, *cache.shape[2:])[slot_mapping] = _bits(_to_cache(values, cache.dtype, scale))


def _to_cache(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Round to the cache's dtype; fp8 saturates instead of overflowing to NaN."""
    if dtype is not torch.float8_e4m3fn:
        return values.to(dtype)
    return (values.float() * (1.0 / scale)).clamp(-_FP8_MAX, _FP8_MAX).to(dtype)


def _bits(values: Tensor) -> Tensor:
    """fp8 as bytes, which every device can index; the rest as it is."""
    return values.view(torch.uint8) if values.dtype is torch.float8_e4m3fn else values


def _gathered(cache: Tensor, pages: Tensor) -> Tensor:
    """Keys or values of page rows in order: float32 [T, S, Hk, D]."""
    return _bits(cache)[pages.long()].view(cache.dtype).flatten(1, 2).float()


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    request_rows: Tensor,
    page_table: Tensor,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    tree_mask: Tensor | None = None,
) -> Tensor:
    """Causal attention of any mix of prefill chunks and decode rows over a paged cache.

    Query i of a request stands at position seq_len - query_len + i and sees the keys at or before it.

    Args:
        q: float [T, Hq, D]; Hq is a multiple of Hk.
        k_cache, v_cache: float or float8_e4m3fn [num_pages, page_size, Hk, D]; this step's keys are already stored.
        query_start_loc: int32 [R + 1]; tokens at or past its last entry are padding.
        seq_lens: int32 [R]; tokens, this step included.
        request_rows: int32 [R]; page-table row of each request.
        page_table: int32 [num_rows, max_pages].
        scale: multiplies the scores.
        sliding_window: a query sees at most this many last keys, itself included; 0 means all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 means no cap.
        k_scale, v_scale: what a stored fp8 number is multiplied by; 1 for other caches.
        tree_mask: see tree_visible; None is causal.

    Returns:
        [T, Hq, D], dtype of q; zero for padding tokens.
    """
    num_tokens, num_requests = q.shape[0], seq_lens.shape[0]
    token = torch.arange(num_tokens, device=q.device)
    starts = query_start_loc.long()
    request = torch.searchsorted(starts, token, right=True) - 1
    is_real = request < num_requests
    request = request.clamp(0, num_requests - 1)
    last_position = seq_lens.long()[request] - 1 - (starts[request + 1] - 1 - token)
    # -1 leaves a padding token no key to see.
    last_position = torch.where(is_real, last_position, -1)
    rows = page_table[request_rows.long()[request]]
    seen = None if tree_mask is None else tree_visible(tree_mask, seq_lens, rows.shape[1] * k_cache.shape[1])

    outputs = []
    # A library's product of several rows may add up otherwise than of one, and of one at another alignment.
    chunk_len = 1 if is_batch_invariant() else _TOKENS_PER_CHUNK
    for start in range(0, num_tokens, chunk_len):
        chunk = slice(start, start + chunk_len)
        attended = _attend(
            q[chunk].clone(), k_cache, v_cache, last_position[chunk], rows[chunk], scale * k_scale, sliding_window,
            soft_cap, None if seen is None else seen[chunk],
        )  # fmt: skip
        outputs.append((attended * v_scale).to(q.dtype))
    return torch.cat(outputs) if outputs else torch.empty_like(q)


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    last_position: Tensor,
    pages: Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    seen: Tensor | None = None,
) -> Tensor:
    """Attend each token to the keys of its own page row, up to its own last position; float32.

    `seen`, bool [T, S], says instead which keys these are.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    position = torch.arange(pages.shape[1] * k_cache.shape[1], device=q.device)
    is_visible = position <= last_position.unsqueeze(1)
    if sliding_window > 0:
        is_visible = is_visible & (position > last_position.unsqueeze(1) - sliding_window)
    if seen is not None:
        is_visible = seen

    keys, values = _gathered(k_cache, pages), _gathered(v_cache, pages)
    values = torch.where(is_visible[:, :, None, None], values, 0.0)
    grouped = q.float().reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("thgd,tshd->thgs", grouped, keys) * scale
    if soft_cap > 0.0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = torch.where(is_visible[:, None, None, :], scores, float("-inf"))
    weights = torch.where(is_visible[:, None, None, :], scores.softmax(-1), 0.0)
    return torch.einsum("thgs,tshd->thgd", weights, values).reshape(q.shape)


def tree_visible(tree_mask: Tensor, seq_lens: Tensor, num_keys: int) -> Tensor:
    """Which keys the tokens of a branching step see: all before the step, and of the step what the mask allows.

    Args:
        tree_mask: integer [R, W, W]; nonzero [r, i, j] lets token i of request r see token j.
        seq_lens: int32 [R]; tokens, this step included.

    Returns:
        bool [R * W, num_keys].
    """
    width = tree_mask.shape[1]
    first = (seq_lens.long() - width)[:, None]
    place = torch.arange(num_keys, device=tree_mask.device) - first
    own = (tree_mask != 0).gather(2, place.clamp(0, width - 1)[:, None, :].expand(-1, width, -1))
    seen = (place < 0)[:, None] | (own & (place < width)[:, None])
    return seen.flatten(0, 1)


def rope_store_attention(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    norm_eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    request_rows: Tensor,
    page_table: Tensor,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    tree_mask: Tensor | None = None,
) -> Tensor:
    """The attention block between the two projections: q/k norm, rope, KV store, paged attention.

    Args:
        qkv: float [T, (Hq + 2 Hk) * D]; query heads, then key heads, then value heads.
        cos, sin: see apply_rope; both None for a layer without rope.
        q_norm_weight, k_norm_weight: float32 [D]; None means no norm.
        positions: int64 [T]; rope positions.
        The others: see store_kv and paged_attention. k_cache and v_cache are written in place.

    Returns:
        [T, Hq * D], dtype of qkv.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q, k, v = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm_weight is not None:
        q = rms_norm(q, q_norm_weight, norm_eps)
    if k_norm_weight is not None:
        k = rms_norm(k, k_norm_weight, norm_eps)
    if cos is not None and sin is not None:
        q = apply_rope(q, cos, sin, positions)
        k = apply_rope(k, cos, sin, positions)
    store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    attended = paged_attention(
        q,
        k_cache,
        v_cache,
        query_start_loc,
        seq_lens,
        request_rows,
        page_table,
        scale,
        sliding_window,
        soft_cap,
        k_scale,
        v_scale,
        tree_mask,
    )
    return attended.flatten(1)
