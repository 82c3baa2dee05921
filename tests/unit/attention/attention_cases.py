"""Small attention steps, and what attention is by definition: one dense softmax a query, in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from graphrunner.attention.backend import AttentionBackend, AttentionSpec
from graphrunner.core.forward_batch import ForwardBatch, KVLayer
from graphrunner.core.shape_key import ForwardMode


@dataclass(frozen=True)
class Case:
    """One step: what each request has cached and computes now, and the layer."""

    query_lens: tuple[int, ...]
    cached_lens: tuple[int, ...]
    mode: ForwardMode = ForwardMode.MIXED
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_qk_norm: bool = False
    has_rope: bool = True
    num_padding_reqs: int = 0
    num_padding_tokens: int = 0
    max_len: int = 64


DECODE, VERIFY, PREFILL, MIXED = ForwardMode.DECODE, ForwardMode.VERIFY, ForwardMode.PREFILL, ForwardMode.MIXED

CASES = {
    "decode": Case((1, 1, 1), (0, 6, 23), DECODE),
    "decode-alone-page-full": Case((1,), (7,), DECODE),
    "decode-page-starts": Case((1,), (8,), DECODE),
    "decode-padding": Case((1, 1), (5, 9), DECODE, num_padding_reqs=2, num_padding_tokens=2),
    "verify": Case((4, 4), (3, 17), VERIFY),
    "verify-padding": Case((3, 3, 3), (1, 4, 12), VERIFY, num_padding_reqs=1, num_padding_tokens=3),
    "prefill": Case((5, 1, 13), (0, 0, 0), PREFILL),
    "prefill-long-chunk": Case((70,), (9,), PREFILL, page_size=16, max_len=96),
    "extend-prefix": Case((5, 3), (8, 11), PREFILL),
    "mixed": Case((1, 1, 6), (9, 2, 4), MIXED),
    "mixed-padding": Case((1, 7), (6, 3), MIXED, num_padding_reqs=2, num_padding_tokens=5),
    "mha": Case((1, 5), (4, 0), num_q_heads=3, num_kv_heads=3),
    "mqa-odd": Case((2, 4), (5, 1), num_q_heads=7, num_kv_heads=1),
    "head-24": Case((3, 1), (0, 6), head_dim=24),
    "head-64": Case((3, 1), (2, 6), head_dim=64),
    "window": Case((1, 9), (20, 3), sliding_window=5),
    "window-decode": Case((1, 1, 1), (2, 5, 21), DECODE, sliding_window=4),
    "window-one": Case((1, 3), (7, 0), sliding_window=1),
    "soft-cap": Case((1, 5), (9, 2), soft_cap=2.0),
    "soft-cap-decode": Case((1, 1), (9, 2), DECODE, soft_cap=2.0),
    "qk-norm": Case((1, 5), (9, 2), has_qk_norm=True),
    "qk-norm-decode": Case((1, 1), (9, 2), DECODE, has_qk_norm=True),
    "no-rope": Case((1, 5), (9, 2), has_rope=False),
    "no-rope-decode": Case((1, 1), (9, 2), DECODE, has_rope=False),
    "page-1": Case((1, 5), (9, 2), page_size=1),
    "page-3": Case((1, 5), (9, 2), page_size=3),
    "page-32": Case((1, 5), (40, 2), page_size=32),
    "everything": Case(
        (1, 1, 6), (21, 2, 4), num_q_heads=6, num_kv_heads=2, sliding_window=7, soft_cap=3.0, has_qk_norm=True,
        num_padding_reqs=1, num_padding_tokens=2,
    ),
}  # fmt: skip


@dataclass
class Step:
    """A case made concrete on a device, with the cache poisoned wherever nobody wrote."""

    spec: AttentionSpec
    qkv: torch.Tensor
    kv: KVLayer
    batch: ForwardBatch
    expected: torch.Tensor
    expected_keys: torch.Tensor
    expected_values: torch.Tensor

    def run(self, attention: AttentionBackend) -> torch.Tensor:
        batch = replace(self.batch, attention=attention, attention_metadata=None)
        batch = replace(batch, attention_metadata=attention.prepare_metadata(batch))
        return attention.forward(self.spec, self.qkv.clone(), self.kv, batch)


def make_step(case: Case, device: str = "cpu", dtype: torch.dtype = torch.float32, pad_seq_len: int = 1) -> Step:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    num_reqs, num_heads = len(case.query_lens), case.num_q_heads + 2 * case.num_kv_heads
    num_tokens = sum(case.query_lens)
    num_columns = -(-case.max_len // case.page_size)
    num_pages = num_reqs * num_columns + 3
    pages = list(range(1, num_pages))
    random.Random(1).shuffle(pages)
    page_table = torch.zeros(num_reqs + 2, num_columns, dtype=torch.int32)
    k_cache = torch.full((num_pages, case.page_size, case.num_kv_heads, case.head_dim), float("nan"))
    v_cache = k_cache.clone()
    spec = _spec(case, normal)
    qkv = normal(num_tokens, num_heads * case.head_dim).to(dtype).float()
    positions, slots, outputs, all_keys, all_values, start = [], [], [], [], [], 0
    for r, (query_len, cached_len) in enumerate(zip(case.query_lens, case.cached_lens, strict=True)):
        row = num_reqs - r  # rows in another order than requests
        seq_len = cached_len + query_len
        owned = [pages.pop() for _ in range(-(-seq_len // case.page_size))]
        page_table[row, : len(owned)] = torch.tensor(owned, dtype=torch.int32)
        # Columns past the sequence hold a page of somebody else: stale, and not to be read.
        page_table[row, len(owned) :] = num_pages - 1 if owned[-1] != num_pages - 1 else num_pages - 2
        request_slots = [owned[p // case.page_size] * case.page_size + p % case.page_size for p in range(seq_len)]
        old_k, old_v = (normal(cached_len, case.num_kv_heads, case.head_dim).to(dtype).float() for _ in range(2))
        k_cache.view(-1, *k_cache.shape[2:])[request_slots[:cached_len]] = old_k
        v_cache.view(-1, *v_cache.shape[2:])[request_slots[:cached_len]] = old_v
        new_positions = list(range(cached_len, seq_len))
        out, keys, values = _dense(case, spec, qkv[start : start + query_len], new_positions, old_k=old_k, old_v=old_v)
        outputs.append(out)
        all_keys.append(keys)
        all_values.append(values)
        positions += new_positions
        slots += request_slots[cached_len:]
        start += query_len
    padding = case.num_padding_tokens
    is_uniform = case.mode in (DECODE, VERIFY)
    width = case.query_lens[0] if is_uniform else 0
    starts = [sum(case.query_lens[:i]) for i in range(num_reqs + 1)]
    starts += [starts[-1] + width * (i + 1) for i in range(case.num_padding_reqs)]
    pad_heads = torch.full((padding, num_heads * case.head_dim), float("nan"))
    seq_lens = [q + c for q, c in zip(case.query_lens, case.cached_lens)] + [pad_seq_len] * case.num_padding_reqs

    def int_tensor(values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    batch = ForwardBatch(
        mode=case.mode,
        input_ids=torch.zeros(num_tokens + padding, dtype=torch.int32, device=device),
        positions=int_tensor(positions + [0] * padding, torch.int64),
        slot_mapping=int_tensor(slots + [0] * padding, torch.int64),
        request_rows=int_tensor([*range(num_reqs, 0, -1), *[0] * case.num_padding_reqs], torch.int32),
        seq_lens=int_tensor(seq_lens, torch.int32),
        query_start_loc=int_tensor(starts, torch.int32),
        page_table=page_table.to(device),
        logits_indices=int_tensor([0] * len(seq_lens), torch.int64),
        kv_layers=(KVLayer(k_cache.to(device, dtype), v_cache.to(device, dtype)),),
        attention=None,  # type: ignore[arg-type]
        attention_metadata=None,
        num_tokens=num_tokens + padding,
        num_reqs=len(seq_lens),
        max_query_len=max(case.query_lens),
        max_seq_len=case.max_len,
    )
    on_device = {
        name: value.to(device)
        for name in ("q_norm_weight", "k_norm_weight", "rope_cos", "rope_sin")
        if (value := getattr(spec, name)) is not None
    }
    return Step(
        spec=replace(spec, **on_device),
        qkv=torch.cat([qkv, pad_heads]).to(device, dtype),
        kv=batch.kv_layers[0],
        batch=batch,
        expected=torch.cat(outputs),
        expected_keys=torch.cat(all_keys),
        expected_values=torch.cat(all_values),
    )


def _spec(case: Case, normal) -> AttentionSpec:
    half = case.head_dim // 2
    angles = torch.arange(case.max_len).unsqueeze(1) / 100.0 ** (torch.arange(half) / half)
    return AttentionSpec(
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        scale=0.3,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        q_norm_weight=1 + 0.3 * normal(case.head_dim) if case.has_qk_norm else None,
        k_norm_weight=1 + 0.3 * normal(case.head_dim) if case.has_qk_norm else None,
        norm_eps=1e-5,
        rope_cos=angles.cos().float() if case.has_rope else None,
        rope_sin=angles.sin().float() if case.has_rope else None,
    )


def _dense(case: Case, spec: AttentionSpec, qkv, positions: list[int], *, old_k, old_v):
    """One request, from the definition: (output [Q, Hq * D], new keys, new values)."""
    heads = qkv.double().view(len(positions), -1, case.head_dim)
    q, k, v = heads.split([case.num_q_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
    if case.has_qk_norm:
        q, k = _normed(q, spec.q_norm_weight, spec.norm_eps), _normed(k, spec.k_norm_weight, spec.norm_eps)
    if case.has_rope:
        q, k = (_rotated(x, spec.rope_cos[positions], spec.rope_sin[positions]) for x in (q, k))
    keys, values = torch.cat([old_k.double(), k]), torch.cat([old_v.double(), v])
    group = case.num_q_heads // case.num_kv_heads
    out = torch.empty(len(positions), case.num_q_heads, case.head_dim, dtype=torch.float64)
    for i, position in enumerate(positions):
        first = 0 if case.sliding_window is None else max(0, position - case.sliding_window + 1)
        for h in range(case.num_q_heads):
            scores = keys[first : position + 1, h // group] @ q[i, h] * spec.scale
            if case.soft_cap is not None:
                scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
            out[i, h] = scores.softmax(0) @ values[first : position + 1, h // group]
    return out.flatten(1), k, v


def _normed(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _rotated(x, cos, sin):
    c, s = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)
