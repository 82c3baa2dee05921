"""Every attention backend against the definition of attention, with everything it must not read poisoned."""

import pytest
import torch
from attention_cases import CASES, Case, make_step

from graphrunner.attention.cpu_attention import CpuAttention
from graphrunner.attention.torch_attention import TorchAttention

BACKENDS = {"torch": TorchAttention, "cpu": CpuAttention}


def triton_attention():
    from graphrunner.attention.triton_attention import TritonAttention

    return TritonAttention()


def check(attention, case: Case, device: str = "cpu", dtype=torch.float32, tolerance: float = 2e-5) -> None:
    step = make_step(case, device, dtype, attention.pad_seq_len)
    out = step.run(attention)
    num_tokens = len(step.expected)
    assert out.shape == (step.batch.num_tokens, case.num_q_heads * case.head_dim)
    assert out.dtype == dtype
    torch.testing.assert_close(out[:num_tokens].double().cpu(), step.expected, rtol=tolerance, atol=tolerance)
    slots = step.batch.slot_mapping[:num_tokens]
    for cache, expected in ((step.kv.k, step.expected_keys), (step.kv.v, step.expected_values)):
        stored = cache.flatten(0, 1)[slots].double().cpu()
        torch.testing.assert_close(stored, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_the_definition(backend, case):
    check(BACKENDS[backend](), CASES[case])


@pytest.mark.parametrize("backend", BACKENDS)
def test_touches_only_its_slots(backend):
    """Pages of others keep their bytes; only the step's slots and the dummy page are written."""
    step = make_step(CASES["mixed-padding"])
    before = step.kv.k.clone()
    step.run(BACKENDS[backend]())
    changed = (step.kv.k.view(torch.int32) != before.view(torch.int32)).any(-1).any(-1).flatten()
    allowed = set(step.batch.slot_mapping.tolist()) | set(range(step.kv.k.shape[1]))
    assert set(changed.nonzero().flatten().tolist()) <= allowed


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16(backend):
    check(BACKENDS[backend](), CASES["everything"], dtype=torch.bfloat16, tolerance=3e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_triton_on_cuda(case):
    check(triton_attention(), CASES[case], device="cuda", tolerance=3e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_triton_on_cuda_bfloat16(case):
    check(triton_attention(), CASES[case], device="cuda", dtype=torch.bfloat16, tolerance=3e-2)
