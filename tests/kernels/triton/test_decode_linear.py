"""Fused small-batch projections against their torch twins."""

from dataclasses import replace

import pytest
import torch

from graphrunner.config.engine_config import GraphBackend
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardVariant, ShapeKey
from graphrunner.execution.registry import create_execution_backend
from graphrunner.kernels import reference
from graphrunner.kernels.triton import decode_linear, linear_config, runtime
from graphrunner.kernels.triton.linear_config import LinearConfig, LinearKind, LinearMode
from graphrunner.kernels.triton.sample import ArgmaxPartials, reduce_argmax

VECTOR = LinearConfig(LinearKind.VECTOR, block_n=2, block_k=64, num_stages=2)
MMA = LinearConfig(LinearKind.MMA, block_n=16, block_k=32, slices=2, num_stages=2)
SKINNY = LinearConfig(LinearKind.SKINNY, block_n=64, block_k=32, num_stages=2, block_b=16)
SPLIT = LinearConfig(LinearKind.SKINNY, block_n=64, block_k=32, slices=2, num_stages=2, block_b=16)
TAILED = replace(SPLIT, block_b=32, has_tail=True)
ONE_TURN = LinearConfig(LinearKind.MMA, block_n=16, block_k=64, slices=4, num_stages=2)
WIDTH, RAGGED_WIDTH, NUM_OUTPUTS, EPS = 128, 144, 48, 1e-5


def _call(
    mode: LinearMode, num_rows: int, dtype: torch.dtype, device: torch.device, has_norm: bool, has_bias: bool,
    width: int = WIDTH,
):  # fmt: skip
    num_weight_rows = NUM_OUTPUTS * (2 if mode is LinearMode.GATED else 1)
    x = torch.randn(num_rows, width, dtype=dtype, device=device)
    weight = torch.randn(num_weight_rows, width, dtype=dtype, device=device) * 0.1
    norm_weight = torch.rand(width, device=device) + 0.5 if has_norm else None
    bias = torch.randn(num_weight_rows, dtype=dtype, device=device) if has_bias else None
    residual = torch.randn(num_rows, NUM_OUTPUTS, dtype=dtype, device=device)
    out = torch.full((num_rows, NUM_OUTPUTS), float("nan"), dtype=dtype, device=device)
    return decode_linear.LinearCall(mode, x, norm_weight, EPS, weight, bias, residual, out)


def _expected(call: decode_linear.LinearCall) -> torch.Tensor:
    x, weight = call.x.float(), call.weight.float()
    bias = None if call.bias is None else call.bias.float()
    if call.mode is LinearMode.GATED:
        return reference.norm_gate_up(x, call.norm_weight, EPS, weight, "gelu_tanh" if call.is_gelu else "silu")
    projected = reference.norm_linear(x, call.norm_weight, EPS, weight, bias)
    return call.residual.float() + projected if call.mode is LinearMode.RESIDUAL else projected


def _check(call: decode_linear.LinearCall, config: LinearConfig) -> None:
    partials = None
    if call.mode is LinearMode.ARGMAX:
        size = (call.x.shape[0], decode_linear.num_programs(config, call.shape, call.x.device))
        partials = ArgmaxPartials(
            torch.empty(size, device=call.x.device), torch.empty(size, dtype=torch.int32, device=call.x.device)
        )
    decode_linear.launch_linear(call, config, partials)
    tolerance = 1e-4 if call.x.dtype is torch.float32 else 3e-2
    torch.testing.assert_close(call.out.float(), _expected(call), atol=tolerance, rtol=tolerance)
    if partials is not None:
        assert reduce_argmax(partials).tolist() == call.out.float().argmax(-1).tolist()


@pytest.mark.parametrize("mode", list(LinearMode))
@pytest.mark.parametrize("num_rows", [1, 2])
def test_vector_kernel_matches_twin(mode, num_rows, device):
    has_bias = mode in (LinearMode.PLAIN, LinearMode.RESIDUAL)
    _check(_call(mode, num_rows, torch.float32, device, mode is not LinearMode.RESIDUAL, has_bias), VECTOR)


@pytest.mark.parametrize("mode", list(LinearMode))
def test_tensor_core_kernel_matches_twin(mode, device):
    """5 rows: no power of two."""
    has_bias = mode in (LinearMode.PLAIN, LinearMode.RESIDUAL)
    _check(_call(mode, 5, torch.bfloat16, device, mode is not LinearMode.RESIDUAL, has_bias), MMA)


@pytest.mark.parametrize("mode", list(LinearMode))
@pytest.mark.parametrize(
    ("config", "num_rows"), [(VECTOR, 2), (MMA, 3), (ONE_TURN, 8)], ids=["vector", "turns", "one turn"]
)
def test_rows_of_no_whole_number_of_chunks_match_twin(mode, config, num_rows, device):
    """What lies past a row is the next one's: NaN after the last row, and 112 of 256 columns nobody has."""
    dtype = torch.float32 if config is VECTOR else torch.bfloat16
    call = _call(mode, num_rows, dtype, device, mode is not LinearMode.RESIDUAL, False, RAGGED_WIDTH)
    padded = torch.full((call.weight.numel() + 256,), float("nan"), dtype=dtype, device=device)
    padded[: call.weight.numel()] = call.weight.flatten()
    _check(replace(call, weight=padded[: call.weight.numel()].view_as(call.weight)), config)


@pytest.mark.parametrize("mode", list(LinearMode))
@pytest.mark.parametrize("num_rows", [9, 33])
@pytest.mark.parametrize("is_described", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("config", [SKINNY, SPLIT, TAILED], ids=["whole", "split", "split with a tail"])
def test_skinny_kernel_matches_twin(mode, num_rows, config, is_described, device):
    """33 rows: two blocks and a ragged one, or one and its tail. Twice: the counters of arrivals are ready again."""
    config = replace(config, is_described=is_described)
    if config.slices > 1 and mode is LinearMode.ARGMAX:
        config = replace(config, slices=1)  # a head is large enough without splits
    has_bias = mode in (LinearMode.PLAIN, LinearMode.RESIDUAL)
    for _ in range(2):
        _check(_call(mode, num_rows, torch.bfloat16, device, mode is not LinearMode.RESIDUAL, has_bias), config)


@pytest.mark.parametrize("mode", [LinearMode.PLAIN, LinearMode.GATED, LinearMode.ARGMAX])
@pytest.mark.parametrize("num_rows", [5, 33])
@pytest.mark.parametrize("is_described", [False, True], ids=["pointers", "descriptors"])
def test_skinny_kernel_normalises_its_own_rows(mode, num_rows, is_described, device):
    """33 rows: a block and its tail."""
    config = replace(TAILED, slices=1, fuses_norm=True, is_described=is_described)
    _check(_call(mode, num_rows, torch.bfloat16, device, True, mode is LinearMode.PLAIN), config)


def test_counters_of_a_split_product_are_not_made_in_a_recording(monkeypatch):
    runtime._arrivals.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="inside a recording"):
            runtime._arrivals(torch.device("cuda"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert not runtime._arrivals(device).any(), "the failure was not remembered"


@pytest.mark.cuda
def test_a_split_product_is_recorded_though_its_counters_were_not_there(device):
    runtime._arrivals.cache_clear()
    call = _call(LinearMode.PLAIN, 9, torch.bfloat16, device, True, False)
    execution = create_execution_backend(GraphBackend.FULL, device)

    def forward() -> ModelOutput:
        decode_linear.launch_linear(call, SPLIT)
        return ModelOutput(logits=call.out + 0)

    keys = [ShapeKey(size, size, ForwardVariant.LOGITS) for size in (9, 8)]
    with torch.inference_mode(), execution.capture_session():
        execution.capture_one(keys[0], lambda: ModelOutput(logits=call.x + 0))
        execution.capture_one(keys[1], forward)
    for _ in range(2):
        call.out.fill_(float("nan"))
        made = execution.replay(keys[1]).logits.float()
        torch.testing.assert_close(made, _expected(call), atol=3e-2, rtol=3e-2)
    execution.close()


def test_projection_without_norm(device):
    _check(_call(LinearMode.PLAIN, 1, torch.float32, device, False, False), VECTOR)


@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_public_operations_choose_a_working_kernel(num_rows, device):
    x = torch.randn(num_rows, WIDTH, dtype=torch.bfloat16, device=device)
    norm_weight = torch.rand(WIDTH, device=device) + 0.5
    weight = torch.randn(256, WIDTH, dtype=torch.bfloat16, device=device) * 0.1
    residual = torch.randn(num_rows, 256, dtype=torch.bfloat16, device=device)
    wide = (x.float(), norm_weight, EPS, weight.float())
    expected = reference.norm_linear(*wide)
    added = reference.linear_residual(x.float(), weight.float(), None, residual.float())
    torch.testing.assert_close(
        decode_linear.norm_linear(x, norm_weight, EPS, weight).float(), expected, atol=5e-2, rtol=3e-2
    )
    for activation in ("silu", "gelu_tanh"):
        torch.testing.assert_close(
            decode_linear.norm_gate_up(x, norm_weight, EPS, weight, activation).float(),
            reference.norm_gate_up(*wide, activation), atol=5e-2, rtol=5e-2,
        )  # fmt: skip
    torch.testing.assert_close(
        decode_linear.linear_residual(x, weight, None, residual).float(), added, atol=5e-2, rtol=3e-2
    )
    logits, partials = decode_linear.norm_linear_argmax(x, norm_weight, EPS, weight)
    assert reduce_argmax(partials).tolist() == logits.float().argmax(-1).tolist()


@pytest.fixture
def overrides(monkeypatch, request) -> dict[str, LinearConfig]:
    """The user's configurations: none, and forgotten afterwards."""
    request.addfinalizer(linear_config._measured_or_default.cache_clear)
    monkeypatch.setattr(linear_config, "_overrides", {})
    return linear_config._overrides


def test_overrides_survive_a_round_trip_through_the_cache_file(tmp_path, device, overrides):
    shape = linear_config.LinearShape(LinearMode.PLAIN, 64, 128)
    key = linear_config.config_key(device, torch.bfloat16, shape, 3)
    linear_config.set_config(key, MMA)
    linear_config.save_overrides(tmp_path / "tuned.json")
    overrides.clear()
    assert linear_config.load_overrides(tmp_path / "tuned.json") == 1
    assert linear_config.select_config(shape, 4, torch.bfloat16, device) == MMA
    (tmp_path / "broken.json").write_text("{")
    assert linear_config.load_overrides(tmp_path / "broken.json") == 0


def test_what_was_tuned_for_more_rows_leaves_what_is_shipped_for_fewer(device, overrides, monkeypatch):
    monkeypatch.setattr(runtime, "device_key", lambda device: "sm90x132")
    shape = linear_config.LinearShape(LinearMode.PLAIN, 4096, 1024)

    def select(num_rows: int) -> LinearConfig:
        return linear_config.select_config(shape, num_rows, torch.bfloat16, device)

    before = {num_rows: select(num_rows) for num_rows in (1, 8, 64, 96)}
    linear_config.set_config(linear_config.config_key(device, torch.bfloat16, shape, 64), SKINNY)
    assert {num_rows: select(num_rows) for num_rows in before} == before | {64: SKINNY}
    assert select(33) == SKINNY, "which has no measurement of its own"


def test_float16_takes_no_measured_kernel_on_tensor_cores(device, overrides, monkeypatch):
    """A row times the norm weight could overflow before the norm's factor is applied."""
    monkeypatch.setattr(runtime, "device_key", lambda device: "sm90x132")
    shape = linear_config.LinearShape(LinearMode.PLAIN, 4096, 1024)
    kinds = {
        num_rows: linear_config.select_config(shape, num_rows, torch.float16, device).kind
        for num_rows in range(1, linear_config.MAX_SKINNY_ROWS + 2)
    }
    assert kinds == dict.fromkeys(kinds, LinearKind.LIBRARY) | {1: LinearKind.VECTOR}


@pytest.mark.parametrize("key", linear_config.TUNED_LINEAR)
def test_shipped_configuration_is_valid_at_all_rows_it_stands_for(key, device, overrides, monkeypatch):
    card, _, mode, sizes, _ = key.split("/")
    monkeypatch.setattr(runtime, "device_key", lambda device: card)
    shape = linear_config.LinearShape(LinearMode[mode.upper()], *map(int, sizes.split("x")))
    config, prefix = linear_config.config_from_row(linear_config.TUNED_LINEAR[key]), key.rpartition("rows")[0]
    measured = {int(other.rpartition("rows")[2]) for other in linear_config.TUNED_LINEAR if other.startswith(prefix)}
    for num_rows in range(1, linear_config.MAX_SKINNY_ROWS + 1):
        if min((rows for rows in measured if rows >= num_rows), default=0) == int(key.rpartition("rows")[2]):
            assert linear_config.select_config(shape, num_rows, torch.bfloat16, device) == config


@pytest.mark.parametrize("width", [64, 96, 576, 896, 1024, 1536, 3072, 4864, 14336])
@pytest.mark.parametrize("num_outputs", [50257, 49152, 576])
@pytest.mark.parametrize("num_rows", [1, 2, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_default_configuration_is_valid_for_any_shape(width, num_outputs, num_rows, dtype):
    for mode in LinearMode:
        shape = linear_config.LinearShape(mode, num_outputs, width)
        assert linear_config.is_valid(linear_config.default_config(shape, num_rows, dtype), shape, num_rows, dtype)
