"""Projections by packed weights against their twins: the same product by the widened weight."""

import pytest
import torch

from graphrunner.config.quantization import Quantization
from graphrunner.kernels import reference
from graphrunner.kernels.packed_weight import Weight, dequantize
from graphrunner.kernels.triton import quantized_linear, runtime
from graphrunner.kernels.triton.linear_config import LinearMode
from graphrunner.kernels.triton.quantized_config import PackedConfig, PackedKind, is_valid, select_packed_config
from graphrunner.kernels.triton.sample import reduce_argmax
from graphrunner.weights.quantize import quantize, stack

PACKINGS = [one for one in Quantization if one is not Quantization.NONE]
MODES = [LinearMode.PLAIN, LinearMode.GATED, LinearMode.RESIDUAL]
CONFIGS = {
    "vector": PackedConfig(PackedKind.VECTOR, block_n=8, block_k=128),
    "sliced": PackedConfig(PackedKind.SLICED, block_n=16, block_k=32, slices=2, num_stages=2),
    "tile": PackedConfig(PackedKind.TILE, block_n=32, block_k=32, block_b=16, slices=1, num_stages=2),
    "split tile": PackedConfig(PackedKind.TILE, block_n=32, block_k=32, block_b=16, slices=4, num_stages=2),
}
WIDTH, NUM_OUTPUTS, EPS = 256, 40, 1e-5


def packed(num_rows: int, width: int, packing: Quantization, device: torch.device) -> Weight:
    """Not a whole number of 128-row blocks, and gate and up rows that meet inside one."""
    return quantize(torch.randn(num_rows, width, device=device) * 0.1, packing)


def call_of(mode, packing, num_rows, dtype, device, has_norm, has_bias) -> quantized_linear.PackedCall:
    weight = packed(NUM_OUTPUTS, WIDTH, packing, device)
    if mode is LinearMode.GATED:
        weight = stack([weight, packed(NUM_OUTPUTS, WIDTH, packing, device)])
    x = torch.randn(num_rows, WIDTH, dtype=dtype, device=device)
    norm_weight = torch.rand(WIDTH, device=device) + 0.5 if has_norm else None
    bias = torch.randn(weight.shape[0], dtype=dtype, device=device) if has_bias else None
    residual = torch.randn(num_rows, NUM_OUTPUTS, dtype=dtype, device=device)
    out = torch.full((num_rows, NUM_OUTPUTS), float("nan"), dtype=dtype, device=device)
    return quantized_linear.PackedCall(mode, x, norm_weight, EPS, weight, bias, residual, out)


def expected_of(call: quantized_linear.PackedCall) -> torch.Tensor:
    x, weight = call.x.float(), dequantize(call.weight)
    bias = None if call.bias is None else call.bias.float()
    projected = reference.norm_linear(x, call.norm_weight, EPS, weight, bias)
    if call.mode is LinearMode.GATED:
        gate, up = projected.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    return call.residual.float() + projected if call.mode is LinearMode.RESIDUAL else projected


def check(call: quantized_linear.PackedCall, config: PackedConfig) -> None:
    assert is_valid(config, call.weight, call.x.shape[0], call.x.dtype)
    for launch in quantized_linear.prepare(call, config, call.x.device):
        launch.run()
    tolerance = 1e-4 if call.x.dtype is torch.float32 else 4e-2
    torch.testing.assert_close(call.out.float(), expected_of(call), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_vector_kernel_matches_twin(mode, packing, device):
    is_residual = mode is LinearMode.RESIDUAL
    check(call_of(mode, packing, 2, torch.float32, device, not is_residual, True), CONFIGS["vector"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_sliced_kernel_matches_twin(mode, packing, device):
    """5 rows: neither a power of two nor a whole tile; 40 outputs: a ragged last tile."""
    is_residual = mode is LinearMode.RESIDUAL
    check(call_of(mode, packing, 5, torch.bfloat16, device, not is_residual, True), CONFIGS["sliced"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("config", ["tile", "split tile"])
def test_tile_kernel_matches_twin(mode, packing, config, device):
    check(call_of(mode, packing, 19, torch.bfloat16, device, False, mode is not LinearMode.RESIDUAL), CONFIGS[config])


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_group_may_be_wider_than_a_turn(packing, device):
    """576 inputs (SmolLM2) are nine turns of 64: two share a block of 128, and the last block is half empty."""
    weight = packed(40, 576, packing, device)
    x = torch.randn(1, 576, device=device)
    for config in (PackedConfig(PackedKind.VECTOR, 8, 64), select_packed_config(weight, 1, x.dtype, False)):
        assert is_valid(config, weight, 1, x.dtype) and config.kind is PackedKind.VECTOR
        out = torch.empty(1, 40, device=device)
        call = quantized_linear.PackedCall(LinearMode.PLAIN, x, None, EPS, weight, None, None, out)
        quantized_linear.prepare_packed(call, config, device).run()
        torch.testing.assert_close(out, x @ dequantize(weight).T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("packing", "num_rows"),
    [*((packing, num_rows) for packing in PACKINGS for num_rows in (1, 3, 20)), (Quantization.FP8, 257)],
)
def test_public_operations_choose_a_working_kernel(packing, num_rows, device):
    x = torch.randn(num_rows, 128, dtype=torch.bfloat16, device=device)
    norm_weight = torch.rand(128, device=device) + 0.5
    weight = packed(64, 128, packing, device)
    bias = torch.randn(64, dtype=torch.bfloat16, device=device)
    residual = torch.randn(num_rows, 64, dtype=torch.bfloat16, device=device)
    wide = dequantize(weight)
    # On a card with an fp8 product many rows are rounded to fp8, which has 3 bits after the leading one.
    is_rounded = packing is Quantization.FP8 and num_rows > 16 and device.type == "cuda"
    close = {"atol": 0.3 if is_rounded else 5e-2, "rtol": 5e-2}
    expected = reference.norm_linear(x.float(), norm_weight, EPS, wide, bias.float())
    added = reference.linear_residual(x.float(), wide, None, residual.float())
    gated = reference.norm_gate_up(x.float(), norm_weight, EPS, wide, "gelu_tanh")
    torch.testing.assert_close(
        quantized_linear.norm_linear(x, norm_weight, EPS, weight, bias).float(), expected, **close
    )
    torch.testing.assert_close(
        quantized_linear.norm_gate_up(x, norm_weight, EPS, weight, "gelu_tanh").float(), gated, **close
    )
    out = quantized_linear.linear_residual(x, weight, None, residual)
    assert out.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(out.float(), added, **close)


def test_the_greedy_token_of_a_packed_head(device):
    weight = packed(300, 128, Quantization.INT8, device)
    x = torch.randn(2, 128, dtype=torch.bfloat16, device=device)
    logits, partials = quantized_linear.norm_linear_argmax(x, None, EPS, weight)
    assert reduce_argmax(partials).tolist() == logits.float().argmax(-1).tolist()


@pytest.mark.parametrize("packing", PACKINGS)
def test_widening_by_slabs_is_the_twin(packing, device, monkeypatch):
    monkeypatch.setattr(quantized_linear, "_SLAB_BYTES", 128 * 160 * 2)
    weight = packed(168, 160, packing, device)
    for rows in (slice(0, 128), slice(128, 168)):
        wide = quantized_linear.widen_rows(weight, rows, torch.float32)
        torch.testing.assert_close(wide, dequantize(weight)[rows], atol=1e-6, rtol=1e-6)
    x = torch.randn(7, 160, dtype=torch.bfloat16, device=device)
    out = x.new_empty(7, 168)
    quantized_linear._library_linear(
        quantized_linear.PackedCall(LinearMode.PLAIN, x, None, EPS, weight, None, None, out), out
    )
    torch.testing.assert_close(out.float(), x.float() @ dequantize(weight).T, atol=0.3, rtol=5e-2)


def test_fp8_bits_are_every_e4m3_number(device, monkeypatch):
    """Cards without the type read its bits: all 254 finite numbers, subnormals and both zeros among them."""
    bits = torch.arange(256, dtype=torch.uint8, device=device).view(1, 256)
    bits[(bits & 127) == 127] = 0
    ones = torch.ones(1, 1, device=device)
    from graphrunner.kernels.packed_weight import WeightLayout

    weight = Weight(WeightLayout.FP8, bits.view(torch.float8_e4m3fn), ones)
    monkeypatch.setattr(runtime, "has_fp8", lambda device: False)
    assert torch.equal(quantized_linear.widen_rows(weight, slice(0, 1), torch.float32), weight.data.float())


def test_rows_are_rounded_to_fp8_with_their_own_scale(device):
    x = torch.randn(3, 200, device=device) * torch.tensor([[1e-3], [1.0], [1e3]], device=device)
    x[0] = 0.0
    norm_weight = torch.rand(200, device=device) + 0.5
    rows, scale = quantized_linear.rows_to_fp8(x, norm_weight, EPS)
    x = reference.rms_norm(x, norm_weight, EPS)
    restored = rows.float() * scale
    assert (restored[0] == 0).all()
    # The interpreter cuts where a card rounds, has no subnormals and drops the carry of a mantissa that rounds up.
    share = 2.0**-4 if device.type == "cuda" else 0.5
    assert ((restored - x).abs() <= x.abs() * share + scale * 2.0**-6).all()


@pytest.mark.parametrize("width", [64, 96, 576, 896, 1536, 4096, 14336])
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 256, 257])
def test_the_chosen_configuration_is_valid_for_any_shape(width, num_rows):
    for packing in PACKINGS:
        weight = quantize(torch.zeros(1, width), packing)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for is_gated in (False, True):
                config = select_packed_config(weight, num_rows, dtype, is_gated)
                assert is_valid(config, weight, num_rows, dtype), (config, packing)
                if num_rows <= 256 and dtype is torch.bfloat16 and width % 64 == 0:
                    assert config.kind is not PackedKind.WIDEN, (packing, width)
