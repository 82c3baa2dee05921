"""Which tiles a step of attention runs."""

import pytest
import torch

from graphrunner.kernels.triton import decode_attention_config
from graphrunner.kernels.triton.decode_attention_config import attention_key, select_decode_config

_CPU = torch.device("cpu")
_SIZES = (8, 128, _CPU, torch.bfloat16)


@pytest.fixture
def table(monkeypatch) -> dict:
    """An empty table of measurements."""
    rows: dict = {}
    monkeypatch.setattr(decode_attention_config, "TUNED_ATTENTION", rows)
    return rows


def test_a_verify_step_has_tiles_of_its_own(table):
    table[attention_key(1, *_SIZES)] = (1, 32, 2, 2, 0)
    table[attention_key(1, *_SIZES, query_width=5)] = (1, 64, 4, 2, 0)
    assert select_decode_config(1, *_SIZES).block_n == 32
    assert all(select_decode_config(1, *_SIZES, query_width=width).block_n == 64 for width in (2, 5, 8))


def test_a_verify_step_that_nobody_measured_runs_the_tiles_of_decode(table):
    table[attention_key(4, *_SIZES)] = (1, 32, 2, 5, 0)
    assert select_decode_config(3, *_SIZES, query_width=5) == select_decode_config(3, *_SIZES)
    assert select_decode_config(3, *_SIZES).num_stages == 5


def test_sizes_that_nobody_measured_run_the_default(table):
    config = select_decode_config(2, *_SIZES, query_width=3)
    assert config == decode_attention_config.default_decode_config(2, *_SIZES)


def test_what_was_measured_for_more_requests_stands_in(table):
    table[attention_key(64, *_SIZES)] = (1, 32, 2, 5, 0)
    table[attention_key(300, *_SIZES)] = (1, 64, 2, 2, 0)
    stages = [select_decode_config(count, *_SIZES).num_stages for count in (1, 40, 64, 65, 256, 300)]
    assert stages == [5, 5, 5, 2, 2, 2]
