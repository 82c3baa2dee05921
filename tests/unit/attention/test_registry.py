import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from attention_cases import CASES, make_step

from graphrunner.attention.registry import AttentionName, create_attention
from graphrunner.core.errors import ConfigError
from graphrunner.kernels import reference

CPU = torch.device("cpu")


def test_the_device_decides():
    assert create_attention(CPU).name == "cpu"
    assert create_attention(torch.device("meta")).name == "torch"
    assert create_attention(CPU, AttentionName.TORCH).name == "torch"


@pytest.mark.parametrize("name", [AttentionName.TRITON, AttentionName.FLASHINFER])
def test_a_backend_of_another_device_is_refused(name):
    with pytest.raises(ConfigError, match=f"attention='{name.value}': runs on cuda, not on cpu"):
        create_attention(CPU, name)


class FakeWrapper:
    """FlashInfer's paged prefill wrapper as documented, answered by the plain torch twin."""

    def __init__(self, workspace, kv_layout):
        assert kv_layout == "NHD"

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, *sizes, causal, sm_scale, window_left,
             logits_soft_cap, q_data_type, kv_data_type):  # fmt: skip
        num_qo_heads, num_kv_heads, head_dim, page_size = sizes
        assert causal and (num_qo_heads % num_kv_heads, head_dim > 0) == (0, True)
        num_pages = kv_indptr.diff()
        self.seq_lens = ((num_pages - 1) * page_size + kv_last_page_len).int()
        self.starts = qo_indptr
        self.table = torch.zeros(len(num_pages), int(num_pages.max()), dtype=torch.int32)
        for row, (first, last) in enumerate(pairwise(kv_indptr)):
            self.table[row, : last - first] = kv_indices[first:last]
        self.numbers = (sm_scale, window_left + 1, logits_soft_cap)

    def run(self, q, kv):
        rows = torch.arange(len(self.seq_lens))
        return reference.paged_attention(q, *kv, self.starts, self.seq_lens, rows, self.table, *self.numbers)


@pytest.mark.parametrize("case", ["mixed-padding", "decode-padding", "everything", "page-3"])
def test_flashinfer_is_told_the_right_numbers(case, monkeypatch):
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = FakeWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    from graphrunner.attention import flashinfer_attention

    monkeypatch.setattr(flashinfer_attention, "_WORKSPACE_BYTES", 16)
    step = make_step(CASES[case])
    out = step.run(flashinfer_attention.FlashInferAttention(CPU))
    expected = step.expected
    torch.testing.assert_close(out[: len(expected)].double(), expected, rtol=2e-5, atol=2e-5)
