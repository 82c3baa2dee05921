"""Floors against figures worked out by hand, and against the speed table's own."""

import pytest
from ceilings import Ceilings
from floors import decode_floor_s, prefill_floor_s, whole_floor_s
from shapes import GPU_SHAPES, num_kv_bytes_per_token

H200 = Ceilings(read_bytes_per_s=4.40e12, flops_per_s=775e12)
ENDLESS = Ceilings(read_bytes_per_s=float("inf"), flops_per_s=1.0)


@pytest.mark.parametrize(
    ("shape", "batch", "context", "floor_ms"),
    [
        ("0.6B", 1, 1024, 0.30),
        ("0.6B", 16, 1024, 0.70),
        ("0.6B", 64, 1024, 1.98),
        ("0.6B", 256, 1024, 7.1),
        ("1B", 1, 96, 0.56),
        ("8B", 1, 1024, 3.44),
        ("8B", 16, 1024, 3.90),
        ("8B", 64, 1024, 5.36),
    ],
)
def test_decode_floors_of_the_speed_table(shape: str, batch: int, context: int, floor_ms: float) -> None:
    floor_s = decode_floor_s(GPU_SHAPES[shape], H200, batch, batch * context, 2)
    assert 1e3 * floor_s == pytest.approx(floor_ms, rel=0.02)


def test_arithmetic_counts_where_it_takes_longer_than_memory() -> None:
    only_bytes = Ceilings(H200.read_bytes_per_s, float("inf"))
    args = (256, 256 * 1024, 2)
    assert 1e3 * decode_floor_s(GPU_SHAPES["8B"], only_bytes, *args) == pytest.approx(11.2, rel=0.02)
    assert decode_floor_s(GPU_SHAPES["8B"], H200, *args) > decode_floor_s(GPU_SHAPES["8B"], only_bytes, *args)


def test_operations_of_a_prompt_are_those_of_its_parts() -> None:
    config = GPU_SHAPES["1B"]
    layers, heads, width = config["num_hidden_layers"], config["num_attention_heads"], config["head_dim"]
    per_layer = 2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192
    products = 2 * 5 * layers * per_layer + 2 * config["vocab_size"] * 2048
    looked_at = 1 + 2 + 3 + 4 + 5
    flops = products + layers * 4 * looked_at * heads * width
    assert prefill_floor_s(config, ENDLESS, [5], 2) == pytest.approx(flops)


def test_a_whole_run_is_its_prompts_and_one_step_a_further_token() -> None:
    config = GPU_SHAPES["0.6B"]
    steps_s = decode_floor_s(config, H200, 2, 9 + 5, 2) + decode_floor_s(config, H200, 1, 10, 2)
    wanted_s = prefill_floor_s(config, H200, [8, 4], 2) + steps_s
    assert whole_floor_s(config, H200, [8, 4], [3, 2], 2) == pytest.approx(wanted_s)


def test_kv_bytes() -> None:
    assert num_kv_bytes_per_token(GPU_SHAPES["8B"]) == 2 * 2 * 32 * 8 * 128
