"""The deterministic projections: bit-equal rows at every row count, and the values of their twins."""

import pytest
import torch

from graphrunner.config.quantization import Quantization
from graphrunner.kernels import reference
from graphrunner.kernels.cpu import invariant_ops
from graphrunner.kernels.packed_weight import Weight, dense_weight, dequantize
from graphrunner.weights.quantize import quantize

COUNTS = [2, 5, 8, 16, 17, 33]


def weight_of(kind: str, num_outputs: int, num_inputs: int) -> Weight:
    dense = torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(2)) / num_inputs**0.5
    if kind in ("int8", "fp8"):
        return quantize(dense, Quantization(kind), 0)
    return dense_weight(dense.to(torch.bfloat16 if kind == "bf16" else torch.float32))


@pytest.mark.parametrize(
    ("kind", "dtype", "width"),
    [
        ("f32", torch.float32, 100),
        ("bf16", torch.float32, 48),
        ("int8", torch.float32, 48),
        ("fp8", torch.float32, 66),
        ("bf16", torch.bfloat16, 48),
    ],
)
def test_a_row_has_the_same_bits_in_every_batch(kind: str, dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(33, width, generator=generator).to(dtype)
    residual = torch.randn(33, 70, generator=generator).to(dtype)
    norm_weight = torch.rand(width, generator=generator) + 0.5
    bias = torch.randn(70, generator=generator).to(dtype)
    weight, pairs = weight_of(kind, 70, width), weight_of(kind, 2 * 40, width)
    ops = {
        "norm_linear": lambda rows, r: invariant_ops.norm_linear(rows, norm_weight, 1e-6, weight, bias),
        "plain": lambda rows, r: invariant_ops.norm_linear(rows, None, 0.0, weight, None),
        "gated": lambda rows, r: invariant_ops.norm_gate_up(rows, norm_weight, 1e-6, pairs, "silu"),
        "residual": lambda rows, r: invariant_ops.linear_residual(rows, weight, bias, r.clone()),
        "tanh": lambda rows, r: invariant_ops.elementwise(torch.tanh, rows),
    }
    for name, run in ops.items():
        alone = torch.cat([run(x[i : i + 1].clone(), residual[i : i + 1]) for i in range(33)])
        for count in COUNTS:
            start = (7 * count) % (34 - count)
            rows = slice(start, start + count)
            assert torch.equal(run(x[rows], residual[rows]), alone[rows]), (name, count)
    expected = reference.norm_linear(x, norm_weight, 1e-6, dequantize(weight).to(dtype), bias)
    found = invariant_ops.norm_linear(x, norm_weight, 1e-6, weight, bias)
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def test_no_rows_at_all() -> None:
    weight = weight_of("f32", 70, 48)
    for dtype in (torch.float32, torch.bfloat16):
        assert invariant_ops.norm_linear(torch.zeros(0, 48, dtype=dtype), None, 0.0, weight, None).shape == (0, 70)
