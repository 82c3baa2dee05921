"""Keys and values kept in fp8: stored saturated and scaled, read back as exactly the numbers that were stored."""

from dataclasses import replace

import pytest
import torch
from attention_cases import CASES, make_step

from graphrunner.attention.cpu_attention import CpuAttention
from graphrunner.attention.torch_attention import TorchAttention
from graphrunner.core.forward_batch import KVLayer
from graphrunner.kernels import reference
from graphrunner.kernels.batch_invariance import batch_invariant

E4M3 = torch.float8_e4m3fn
K_SCALE, V_SCALE = 0.02, 0.5


def test_storing_scales_and_saturates():
    k = torch.tensor([1.0, -3.0, 1e6, -1e6]).view(1, 1, 4)
    caches = [torch.zeros(3, 2, 1, 4).to(E4M3) for _ in range(2)]
    reference.store_kv(k, k, *caches, torch.tensor([3]), k_scale=0.5)
    assert caches[0].float().view(6, 4)[3].tolist() == [2.0, -6.0, 448.0, -448.0]
    assert caches[1].float().view(6, 4)[3].tolist() == [1.0, -3.0, 448.0, -448.0]
    assert (caches[0].float().view(6, 4)[[0, 1, 2, 4, 5]] == 0).all()


@pytest.mark.parametrize("backend", [TorchAttention, CpuAttention])
@pytest.mark.parametrize("case", ["decode", "decode-padding", "mixed-padding", "everything", "prefill", "verify"])
def test_attends_to_the_numbers_in_the_cache(case, backend):
    """The same step on a float cache that holds what the fp8 cache stands for gives the same rows."""
    step = make_step(CASES[case])
    packed = KVLayer(*((cache / scale).to(E4M3) for cache, scale in ((step.kv.k, K_SCALE), (step.kv.v, V_SCALE))))
    spec = replace(step.spec, k_scale=K_SCALE, v_scale=V_SCALE)
    num_tokens = len(step.expected)
    out = replace(step, spec=spec, kv=packed).run(backend())[:num_tokens]
    torch.testing.assert_close(out.double(), step.expected, atol=0.3, rtol=0.1)

    wide = KVLayer(packed.k.float() * K_SCALE, packed.v.float() * V_SCALE)
    slots = step.batch.slot_mapping[:num_tokens]
    expected_keys = step.expected_keys.float() / K_SCALE
    assert (
        torch.equal(packed.k.flatten(0, 1)[slots].float(), expected_keys.to(E4M3).float())
        or (
            (packed.k.flatten(0, 1)[slots].float() - expected_keys).abs() <= expected_keys.abs() * 2.0**-4 + 2.0**-9
        ).all()
    )
    batch = step.batch
    q_heads = step.qkv.view(len(step.qkv), -1, spec.head_dim)[:, : spec.num_q_heads]
    arguments = (batch.query_start_loc, batch.seq_lens, batch.request_rows, batch.page_table, spec.scale, 0, 0.0)
    got = reference.paged_attention(q_heads, packed.k, packed.v, *arguments, K_SCALE, V_SCALE)
    want = reference.paged_attention(q_heads, wide.k, wide.v, *arguments)
    torch.testing.assert_close(got[:num_tokens], want[:num_tokens], atol=1e-5, rtol=1e-5)


def test_a_wide_cache_ignores_the_scales():
    step = make_step(CASES["mixed"])
    scaled = replace(step, spec=replace(step.spec, k_scale=3.0, v_scale=7.0))
    assert torch.equal(scaled.run(CpuAttention()), make_step(CASES["mixed"]).run(CpuAttention()))


def test_a_token_has_the_same_bits_beside_others():
    """Its query lies at another address then, and with these sizes not on a border that processors like."""
    num_tokens, first_len = 12, 6
    q = torch.randn(num_tokens, 3, 22)
    cache = torch.randn(9, 4, 1, 22).to(E4M3)
    pages = torch.arange(1, 9, dtype=torch.int32)[None]

    def attend(first: int, last: int) -> torch.Tensor:
        starts = torch.arange(last - first + 1, dtype=torch.int32)
        seq_lens = torch.arange(first_len + first, first_len + last, dtype=torch.int32)
        rows = torch.zeros(last - first, dtype=torch.int32)
        return reference.paged_attention(q[first:last].clone(), cache, cache, starts, seq_lens, rows, pages, 0.3)

    with batch_invariant(True):
        together = attend(0, num_tokens)
        assert all(torch.equal(attend(i, i + 1)[0], together[i]) for i in range(num_tokens))
