"""Paged attention kernels against the torch twin, with poison in everything that must not be read."""

from dataclasses import replace

import pytest
import torch

from graphrunner.kernels import reference, reference_gpu
from graphrunner.kernels.triton import decode_attention as decode_attention_module
from graphrunner.kernels.triton.attention_common import AttentionLayer, DecodeMetadata, ExtendMetadata
from graphrunner.kernels.triton.decode_attention import decode_attention
from graphrunner.kernels.triton.decode_attention_config import DecodeAttentionConfig
from graphrunner.kernels.triton.gpu_ops import rope_store_attention
from graphrunner.kernels.triton.prefill_attention import ExtendConfig, extend_attention

PAGE, MAX_PAGES = 4, 16


class Step:
    """A random step: caches whose unowned memory is NaN, page rows in shuffled order, metadata, a layer."""

    def __init__(
        self,
        query_lens,
        cached_lens,
        device,
        *,
        heads=(4, 2, 16),
        dtype=torch.float32,
        max_pages=MAX_PAGES,
        **layer_fields,
    ):
        num_q, self.num_kv, self.head_dim = heads
        self.seq_lens = torch.tensor(cached_lens) + torch.tensor(query_lens)
        num_tokens, num_requests = sum(query_lens), len(query_lens)
        self.qkv = torch.randn(num_tokens, (num_q + 2 * self.num_kv) * self.head_dim).to(device, dtype)
        num_pages = 1 + num_requests * max_pages
        shape = (num_pages, PAGE, self.num_kv, self.head_dim)
        self.k_cache = torch.full(shape, float("nan"))
        self.v_cache = torch.full(shape, float("nan"))
        order = torch.randperm(num_pages - 1) + 1
        self.page_table = torch.zeros(num_requests + 1, max_pages, dtype=torch.int32)
        slots, positions = [], []
        for r, (query_len, cached) in enumerate(zip(query_lens, cached_lens, strict=True)):
            needed = -(-(query_len + cached) // PAGE)
            self.page_table[r + 1, :needed] = order[r * max_pages : r * max_pages + needed].int()
            where = torch.arange(query_len + cached)
            slot = self.page_table[r + 1].long()[where // PAGE] * PAGE + where % PAGE
            self.k_cache.view(-1, *shape[2:])[slot[:cached]] = torch.randn(cached, *shape[2:])
            self.v_cache.view(-1, *shape[2:])[slot[:cached]] = torch.randn(cached, *shape[2:])
            slots.append(slot[cached:])
            positions.append(where[cached:])
        self.k_cache, self.v_cache = self.k_cache.to(device, dtype), self.v_cache.to(device, dtype)
        self.slot_mapping, self.positions = torch.cat(slots).to(device), torch.cat(positions).to(device)
        self.page_table, self.seq_lens = self.page_table.to(device), self.seq_lens.int().to(device)
        self.request_rows = torch.arange(1, num_requests + 1, dtype=torch.int32, device=device)
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        self.query_start_loc = starts.int().to(device)
        angles = torch.rand(max_pages * PAGE, layer_fields.pop("half", self.head_dim // 2)) * 6
        norm = (torch.rand(self.head_dim) + 0.5).to(device) if layer_fields.pop("has_norm", True) else None
        self.layer = AttentionLayer(
            self.head_dim**-0.5, angles.cos().to(device), angles.sin().to(device), norm, norm, **layer_fields
        )

    def expected(self):
        """The twin's answer in float32, and the caches it leaves."""
        layer, caches = self.layer, (self.k_cache.float().clone(), self.v_cache.float().clone())
        out = reference.rope_store_attention(
            self.qkv.float(), layer.cos, layer.sin, layer.q_norm_weight, layer.k_norm_weight, layer.norm_eps, *caches,
            self.positions, self.slot_mapping, self.query_start_loc, self.seq_lens, self.request_rows, self.page_table,
            layer.scale, layer.sliding_window, layer.soft_cap,
        )  # fmt: skip
        return out, caches

    def decode_metadata(self, tree_mask=None):
        return DecodeMetadata(
            self.positions, self.slot_mapping, self.seq_lens, self.request_rows, self.page_table, tree_mask
        )

    def extend_metadata(self):
        return ExtendMetadata(
            self.positions, self.slot_mapping, self.seq_lens, self.request_rows, self.page_table, self.query_start_loc
        )

    def check(self, out, tolerance=1e-4, expected=None):
        wanted, (k_cache, v_cache) = expected or self.expected()
        torch.testing.assert_close(out.float(), wanted, atol=tolerance, rtol=tolerance)
        for cache, twin in ((self.k_cache, k_cache), (self.v_cache, v_cache)):
            torch.testing.assert_close(cache.float(), twin, atol=tolerance, rtol=tolerance, equal_nan=True)


LAYERS = {
    "plain": {},
    "window": {"sliding_window": 5},
    "cap": {"soft_cap": 2.0},
    "partial_rope_no_norm": {"half": 4, "has_norm": False},
}


@pytest.mark.parametrize("fields", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode_matches_twin(fields, num_splits, device):
    step = Step([1, 1, 1], [0, 7, 33], device, **fields)
    expected = step.expected()
    config = DecodeAttentionConfig(num_splits, 16)
    out = decode_attention(step.qkv, step.layer, step.k_cache, step.v_cache, step.decode_metadata(), config)
    step.check(out, expected=expected)


@pytest.mark.parametrize("joined_values", [1, 1 << 16], ids=["kernel", "last arriver"])
@pytest.mark.parametrize("min_split_tokens", [0, 32, 1000])
@pytest.mark.parametrize("width", [1, 3])
def test_splits_of_unequal_sequences_join_whatever_their_number(
    width, min_split_tokens, joined_values, device, monkeypatch
):
    """Twice: the counters of arrivals are back at zero after each."""
    monkeypatch.setattr(decode_attention_module, "_JOINED_VALUES", joined_values)
    monkeypatch.setattr(decode_attention_module, "_FEW_REQUESTS", 0)
    step = Step([width] * 4, [0, 60, 17, 48], device)
    expected = step.expected()
    config = DecodeAttentionConfig(16, 16, min_split_tokens=min_split_tokens)
    for _ in range(2):
        out = decode_attention(step.qkv, step.layer, step.k_cache, step.v_cache, step.decode_metadata(), config)
        step.check(out, expected=expected)


@pytest.mark.parametrize("width", [2, 5, 8])
@pytest.mark.parametrize("fields", [{}, {"sliding_window": 3}], ids=["causal", "window"])
def test_verify_width_is_causal_inside(width, fields, device):
    step = Step([width, width], [0, 21], device, **fields)
    expected = step.expected()
    step.check(
        rope_store_attention(step.qkv, step.layer, step.k_cache, step.v_cache, step.decode_metadata()),
        expected=expected,
    )


@pytest.mark.parametrize("head_dim", [48, 80, 64])
def test_head_sizes_that_need_padding(head_dim, device):
    step = Step([1, 1], [3, 18], device, heads=(3, 1, head_dim))
    expected = step.expected()
    step.check(
        rope_store_attention(step.qkv, step.layer, step.k_cache, step.v_cache, step.decode_metadata()),
        expected=expected,
    )


@pytest.mark.parametrize("fields", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("query_lens", [[6, 1, 11], [40]], ids=["mixed", "prompt"])
def test_extend_matches_twin(fields, query_lens, device):
    step = Step(query_lens, [9, 20, 0][: len(query_lens)], device, **fields)
    expected = step.expected()
    step.check(
        rope_store_attention(step.qkv, step.layer, step.k_cache, step.v_cache, step.extend_metadata()),
        expected=expected,
    )


def test_extend_leaves_padding_tokens_and_requests_alone(device):
    step = Step([3, 5], [2, 0], device)
    wanted, _ = step.expected()
    padded = torch.cat((step.qkv, torch.full_like(step.qkv, float("nan"))))
    zeros = torch.zeros(8, dtype=torch.int64, device=device)
    metadata = ExtendMetadata(
        torch.cat((step.positions, zeros)),
        torch.cat((step.slot_mapping, zeros)),
        torch.cat((step.seq_lens, torch.ones(2, dtype=torch.int32, device=device))),
        torch.cat((step.request_rows, torch.zeros(2, dtype=torch.int32, device=device))),
        step.page_table,
        torch.cat((step.query_start_loc, step.query_start_loc[-1:].repeat(2))),
    )
    out = rope_store_attention(padded, step.layer, step.k_cache, step.v_cache, metadata)
    torch.testing.assert_close(out[:8], wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(out[8:], torch.zeros_like(out[8:]))


def test_bfloat16_decode_and_extend(device):
    for metadata_of, lens in ((Step.decode_metadata, [1, 1]), (Step.extend_metadata, [3, 9])):
        step = Step(lens, [5, 17], device, dtype=torch.bfloat16)
        expected = step.expected()
        step.check(
            rope_store_attention(step.qkv, step.layer, step.k_cache, step.v_cache, metadata_of(step)),
            tolerance=3e-2, expected=expected,
        )  # fmt: skip


def test_tree_mask_selects_among_the_new_tokens(device):
    width = 4
    step = Step([width], [10], device, has_norm=False)
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.uint8, device=device)
    out = rope_store_attention(step.qkv, step.layer, step.k_cache, step.v_cache, step.decode_metadata(tree[None]))
    heads = step.qkv.view(width, -1, step.head_dim)
    q, k, v = heads.split([heads.shape[1] - 2 * step.num_kv, step.num_kv, step.num_kv], dim=1)
    q = reference.apply_rope(q, step.layer.cos, step.layer.sin, step.positions)
    k = reference.apply_rope(k, step.layer.cos, step.layer.sin, step.positions)
    flat_k = step.k_cache[step.page_table[1].long()].flatten(0, 1)[:10]
    flat_v = step.v_cache[step.page_table[1].long()].flatten(0, 1)[:10]
    wanted = reference_gpu.tree_attention(q, k, v, flat_k, flat_v, tree, step.layer.scale)
    torch.testing.assert_close(out.view(wanted.shape), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lens", [[1, 1], [5, 2]], ids=["decode", "extend"])
def test_fp8_cache_is_read_as_it_was_stored(lens, device):
    step = Step(lens, [9, 20], device, k_scale=0.5, v_scale=0.25)
    wide = (torch.nan_to_num(step.k_cache), torch.nan_to_num(step.v_cache))
    step.k_cache, step.v_cache = ((c / s).to(torch.float8_e4m3fn) for c, s in zip(wide, (0.5, 0.25), strict=True))
    is_decode = lens == [1, 1]
    metadata = step.decode_metadata() if is_decode else step.extend_metadata()
    qkv = step.qkv.clone()
    out = rope_store_attention(qkv, step.layer, step.k_cache, step.v_cache, metadata)
    step.k_cache, step.v_cache = step.k_cache.float() * 0.5, step.v_cache.float() * 0.25
    wanted, _ = step.expected()
    torch.testing.assert_close(out, wanted, atol=0.1, rtol=0.1)


def test_dummy_row_decodes_without_harm(device):
    """A padding request (row 0, seq_len 1) writes to the dummy page only and leaves real rows alone."""
    step = Step([1], [6], device)
    wanted, _ = step.expected()
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    metadata = DecodeMetadata(
        torch.cat((step.positions, zero)),
        torch.cat((step.slot_mapping, zero)),
        torch.cat((step.seq_lens, torch.ones(1, dtype=torch.int32, device=device))),
        torch.cat((step.request_rows, torch.zeros(1, dtype=torch.int32, device=device))),
        step.page_table,
    )
    qkv = torch.cat((step.qkv, torch.full_like(step.qkv, float("nan"))))
    out = rope_store_attention(qkv, step.layer, step.k_cache, step.v_cache, metadata)
    torch.testing.assert_close(out[:1], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fields", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("block_n", [16, 32])
def test_keys_of_the_step_itself_are_read_where_they_were_made(fields, block_n, device):
    """Prompts, chunks behind pages, a decode row; the tokens past the last request hold NaN."""
    query_lens = [37, 1, 18, 5, 70] if device.type == "cuda" else [18, 1, 5, 2, 35]
    step = Step(query_lens, [0, 9, 21, 3, 16], device, dtype=torch.bfloat16, max_pages=32, **fields)
    expected = step.expected()
    metadata = step.extend_metadata()
    num_tokens = step.qkv.shape[0]
    padded = torch.cat((step.qkv, torch.full_like(step.qkv[:9], float("nan"))))
    zeros = torch.zeros(9, dtype=torch.int64, device=device)  # page 0 is no request's
    metadata = replace(
        metadata,
        positions=torch.cat((metadata.positions, zeros)),
        slot_mapping=torch.cat((metadata.slot_mapping, zeros)),
    )
    page_zero = step.k_cache[0].clone()
    config = ExtendConfig(32, block_n, 4, 2, reads_step=True)
    out = extend_attention(padded, step.layer, step.k_cache, step.v_cache, metadata, config)
    step.k_cache[0] = step.v_cache[0] = page_zero
    step.check(out[:num_tokens], tolerance=3e-2, expected=expected)
    assert not out[num_tokens:].any()


def _fixed(step: Step) -> ExtendMetadata:
    return ExtendMetadata(
        step.positions, step.slot_mapping, step.seq_lens, step.request_rows, step.page_table, step.query_start_loc,
        has_fixed_tiles=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [({}, torch.float32), ({"sliding_window": 5}, torch.bfloat16), ({"soft_cap": 2.0}, torch.bfloat16)],
    ids=["plain", "window", "cap"],
)
def test_attention_of_a_token_is_the_same_in_a_prompt_a_chunk_and_a_decode_step(fields, dtype, device):
    torch.manual_seed(1)
    length = 85 if device.type == "cuda" else 21  # in the interpreter see test_invariant_model.py for more than a tile
    step = Step([length, 2], [0, 9], device, dtype=dtype, max_pages=32, **fields)
    expected, _ = step.expected()
    qkv = step.qkv.clone()
    whole = rope_store_attention(step.qkv, step.layer, step.k_cache, step.v_cache, _fixed(step))
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(whole.float(), expected, atol=tolerance, rtol=tolerance)
    for first, last in ((0, 7), (7, 8), (8, length - 1), (length - 1, length)):
        rows = slice(first, last)
        part = ExtendMetadata(
            step.positions[rows], step.slot_mapping[rows],
            torch.tensor([last], dtype=torch.int32, device=device), step.request_rows[:1], step.page_table,
            torch.tensor([0, last - first], dtype=torch.int32, device=device), has_fixed_tiles=True,
        )  # fmt: skip
        found = rope_store_attention(qkv[rows].clone(), step.layer, step.k_cache, step.v_cache, part)
        assert torch.equal(found, whole[rows]), (first, last)


@pytest.mark.cuda
@pytest.mark.parametrize("query_len", [1, 5])
def test_a_context_of_128k_tokens(query_len, device):
    """Too much for the interpreter; the length at which offsets no longer fit 32 bits."""
    cached_len = (1 << 17) - query_len
    step = Step([query_len], [cached_len], device, heads=(8, 4, 128), dtype=torch.bfloat16, max_pages=1 << 15)
    expected = step.expected()
    out = rope_store_attention(step.qkv, step.layer, step.k_cache, step.v_cache, step.decode_metadata())
    step.check(out, tolerance=3e-2, expected=expected)
