"""Random paged-attention problems for the CPU kernel tests."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Arguments of rope_store_attention for one mixed batch; poison is in every page and slot no request owns."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    request_rows: Tensor
    page_table: Tensor

    def run(
        self,
        attend,
        *,
        norm: Tensor | None = None,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
        has_rope: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call attend on copies of the caches; returns its result and the caches after it."""
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        result = attend(
            self.qkv,
            self.cos if has_rope else None,
            self.sin if has_rope else None,
            norm,
            norm,
            1e-6,
            k_cache,
            v_cache,
            self.positions,
            self.slot_mapping,
            self.query_start_loc,
            self.seq_lens,
            self.request_rows,
            self.page_table,
            0.3,
            sliding_window,
            soft_cap,
        )
        return result, k_cache, v_cache


def attention_case(
    lengths: list[tuple[int, int]],
    *,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    num_padding: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> AttentionCase:
    """Build a batch of (cached_len, query_len) requests whose pages are scattered over the cache."""
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [cached + query for cached, query in lengths]
    pages_of = [-(-length // page_size) for length in seq_lens]
    num_pages = 2 * sum(pages_of) + 2
    free = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    page_table = torch.zeros(len(lengths) + 2, max(pages_of) + 1, dtype=torch.int32)
    caches = [torch.full((num_pages, page_size, num_kv_heads, head_dim), float("nan")) for _ in range(2)]
    slots, positions = [], []
    for row, ((cached, query), count) in enumerate(zip(lengths, pages_of, strict=True), start=1):
        pages = [free.pop() for _ in range(count)]
        page_table[row, :count] = torch.tensor(pages, dtype=torch.int32)
        all_slots = [pages[i // page_size] * page_size + i % page_size for i in range(cached + query)]
        for cache in caches:
            cache.view(-1, num_kv_heads, head_dim)[all_slots[:cached]] = torch.randn(
                cached, num_kv_heads, head_dim, generator=generator
            )
        slots += all_slots[cached:]
        positions += range(cached, cached + query)
    num_tokens = len(slots)
    width = (group + 2) * num_kv_heads * head_dim
    angles = torch.rand(max(seq_lens) + 1, head_dim // 2, generator=generator) * 6.28
    starts = torch.tensor([0] + [query for _, query in lengths]).cumsum(0)
    return AttentionCase(
        qkv=torch.randn(num_tokens + num_padding, width, generator=generator),
        cos=angles.cos(),
        sin=angles.sin(),
        k_cache=caches[0].to(dtype),
        v_cache=caches[1].to(dtype),
        positions=torch.tensor(positions + [0] * num_padding),
        slot_mapping=torch.tensor(slots + [0] * num_padding),
        query_start_loc=starts.to(torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        request_rows=torch.arange(1, len(lengths) + 1, dtype=torch.int32),
        page_table=page_table,
    )
