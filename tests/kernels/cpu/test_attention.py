"""rope_store_attention against its twin: any mix of rows, any head, NaN in all memory nobody owns."""

import pytest
import torch
from cases import AttentionCase, attention_case
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrunner.kernels import reference
from graphrunner.kernels.cpu import ops

HEAD_DIMS = (20, 48, 64, 80, 128, 256)


def check(case: AttentionCase, atol: float = 2e-5, **options) -> None:
    got, got_k, got_v = case.run(ops.rope_store_attention, **options)
    want, want_k, want_v = case.run(reference.rope_store_attention, **options)
    num_real = int(case.query_start_loc[-1])
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got[:num_real], want[:num_real], rtol=1e-4, atol=atol)
    # Page 0 belongs to nobody: padding tokens race for it.
    torch.testing.assert_close(got_k[1:], want_k[1:], rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(got_v[1:], want_v[1:], rtol=0, atol=0, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 1, 2, 5, 40])), min_size=1, max_size=5),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 6),
    head_dim=st.sampled_from(HEAD_DIMS),
    page_size=st.sampled_from([1, 3, 16]),
    num_padding=st.integers(0, 3),
    sliding_window=st.sampled_from([0, 0, 1, 7, 64]),
    soft_cap=st.sampled_from([0.0, 0.0, 5.0]),
    has_norm=st.booleans(),
    has_rope=st.booleans(),
)
def test_equals_twin(
    lengths, num_kv_heads, group, head_dim, page_size, num_padding, sliding_window, soft_cap, has_norm, has_rope
):
    case = attention_case(
        lengths,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        num_padding=num_padding,
    )
    norm = torch.linspace(0.5, 1.5, head_dim) if has_norm else None
    check(case, norm=norm, sliding_window=sliding_window, soft_cap=soft_cap, has_rope=has_rope)


@pytest.mark.parametrize("seq_len", [255, 256, 257, 511, 512, 513, 1100])
@pytest.mark.parametrize("sliding_window", [0, 300])
def test_split_keys_of_long_decode_rows(seq_len, sliding_window):
    case = attention_case([(seq_len - 1, 1), (3, 1)], num_kv_heads=2, group=3, head_dim=64, page_size=16)
    check(case, sliding_window=sliding_window)


@pytest.mark.parametrize("head_dim", [48, 64])
def test_long_prefill_with_prefix(head_dim):
    check(attention_case([(200, 300), (0, 70)], num_kv_heads=3, group=3, head_dim=head_dim, page_size=16))


@pytest.mark.parametrize("head_dim", [20, 64])
def test_bfloat16_cache(head_dim):
    case = attention_case(
        [(70, 1), (5, 9)], num_kv_heads=2, group=2, head_dim=head_dim, page_size=16, dtype=torch.bfloat16
    )
    got, _, got_v = case.run(ops.rope_store_attention)
    want, _, want_v = case.run(reference.rope_store_attention)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got_v[1:], want_v[1:], rtol=0, atol=0, equal_nan=True)


def test_a_later_token_that_is_nan_does_not_reach_an_earlier_one():
    case = attention_case([(4, 12)], num_kv_heads=1, group=2, head_dim=64, page_size=4)
    clean, _, _ = case.run(ops.rope_store_attention)
    case.qkv[7:] = float("nan")
    spoiled, _, _ = case.run(ops.rope_store_attention)
    assert torch.equal(spoiled[:7], clean[:7])
    assert spoiled[7:].isnan().all()


def test_padding_tokens_are_zero_even_if_their_input_is_nan():
    case = attention_case([(4, 1)], num_kv_heads=1, group=1, head_dim=64, page_size=4, num_padding=2)
    case.qkv[1:] = float("nan")
    got, _, _ = case.run(ops.rope_store_attention)
    assert torch.isfinite(got[0]).all()
    assert (got[1:] == 0).all()


def test_padding_requests_have_no_effect():
    case = attention_case([(30, 1), (12, 3)], num_kv_heads=2, group=2, head_dim=64, page_size=16, num_padding=2)
    plain, _, _ = case.run(ops.rope_store_attention)
    padded = AttentionCase(
        **{name: getattr(case, name) for name in case.__slots__}
        | {
            "query_start_loc": torch.cat((case.query_start_loc, case.query_start_loc[-1:].repeat(2))),
            "seq_lens": torch.cat((case.seq_lens, torch.tensor([1, 0], dtype=torch.int32))),
            "request_rows": torch.cat((case.request_rows, torch.zeros(2, dtype=torch.int32))),
        }
    )
    assert torch.equal(padded.run(ops.rope_store_attention)[0], plain)


def test_a_page_table_view_with_cut_columns():
    case = attention_case([(30, 1), (12, 3)], num_kv_heads=2, group=2, head_dim=64, page_size=16)
    wide = torch.cat((case.page_table, torch.full_like(case.page_table, 99)), dim=1)
    view = AttentionCase(
        **{name: getattr(case, name) for name in case.__slots__} | {"page_table": wide[:, : case.page_table.shape[1]]}
    )
    assert torch.equal(view.run(ops.rope_store_attention)[0], case.run(ops.rope_store_attention)[0])


def test_result_is_the_same_alone_and_in_a_batch_and_for_any_thread_count():
    lengths = [(700, 1), (30, 1), (0, 33)]
    case = attention_case(lengths, num_kv_heads=3, group=3, head_dim=64, page_size=16)
    together, _, _ = case.run(ops.rope_store_attention)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(case.run(ops.rope_store_attention)[0], together)
    finally:
        torch.set_num_threads(num_threads)
    for request in range(len(lengths)):
        begin, end = case.query_start_loc[request : request + 2].tolist()
        alone = AttentionCase(
            **{name: getattr(case, name) for name in case.__slots__}
            | {
                "qkv": case.qkv[begin:end],
                "positions": case.positions[begin:end],
                "slot_mapping": case.slot_mapping[begin:end],
                "query_start_loc": torch.tensor([0, end - begin], dtype=torch.int32),
                "seq_lens": case.seq_lens[request : request + 1],
                "request_rows": case.request_rows[request : request + 1],
            }
        )
        assert torch.equal(alone.run(ops.rope_store_attention)[0], together[begin:end])


def test_refuses_a_width_that_does_not_fit_the_heads():
    case = attention_case([(4, 1)], num_kv_heads=2, group=1, head_dim=64, page_size=4)
    bad = AttentionCase(**{name: getattr(case, name) for name in case.__slots__} | {"qkv": case.qkv[:, :-3]})
    with pytest.raises(RuntimeError, match="does not fit 2 kv heads of 64"):
        bad.run(ops.rope_store_attention)


def test_a_nan_key_is_seen_only_by_the_tokens_whose_window_holds_it():
    """Rows of one tile have different windows: what only the first still sees must not be multiplied for the others."""
    case = attention_case([(30, 8)], num_kv_heads=1, group=1, head_dim=64, page_size=1)
    clean, _, _ = case.run(ops.rope_store_attention, sliding_window=10)
    spoiled_page = case.page_table[1, 23]  # the last token that sees position 23 stands at 32
    case.k_cache[spoiled_page] = float("nan")
    case.v_cache[spoiled_page] = float("nan")
    spoiled, _, _ = case.run(ops.rope_store_attention, sliding_window=10)
    assert spoiled[:3].isnan().all()
    assert torch.equal(spoiled[3:], clean[3:])
