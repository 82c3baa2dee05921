"""The linear family against its twins: odd widths, every row count around the crossover, every weight type."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrunner.kernels import reference
from graphrunner.kernels.cpu import ops
from graphrunner.kernels.packed_weight import dense_weight
from graphrunner.layers import ops as layer_ops

ROWS = st.one_of(st.integers(1, 20), st.just(40))
WIDTHS = st.sampled_from([1, 15, 16, 48, 288, 300, 576])
OUTPUTS = st.sampled_from([1, 3, 16, 17, 50, 130])


def rounded(weight: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.view(weight.shape[0], num_groups, -1)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    data = (groups / scale).round().to(torch.int8).view_as(weight)
    return data, scale.flatten(1) if num_groups > 1 else scale.flatten()


def weight_of(kind: str, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """A weight as the kernels take it (data, scale) and the float matrix it stands for."""
    dense = torch.randn(rows, width) / width**0.5
    if kind == "float32":
        return dense, None, dense
    if kind == "bfloat16":
        return dense.bfloat16(), None, dense.bfloat16().float()
    num_groups = 1 if kind == "int8" or width % 3 else 3
    data, scale = rounded(dense, num_groups)
    return data, scale, reference.dequantize_int8(data, scale)


KINDS = st.sampled_from(["float32", "bfloat16", "int8", "int8_grouped"])


@settings(max_examples=80, deadline=None)
@given(rows=ROWS, width=WIDTHS, outputs=OUTPUTS, kind=KINDS, has_norm=st.booleans(), has_bias=st.booleans())
def test_norm_linear(rows, width, outputs, kind, has_norm, has_bias):
    data, scale, dense = weight_of(kind, outputs, width)
    x = torch.randn(rows, width)
    norm = torch.rand(width) if has_norm else None
    bias = torch.randn(outputs) if has_bias else None
    got = ops.norm_linear(x, norm, 1e-5, data, bias, scale)
    torch.testing.assert_close(got, reference.norm_linear(x, norm, 1e-5, dense, bias), rtol=1e-4, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, width=WIDTHS, outputs=OUTPUTS, kind=KINDS, activation=st.sampled_from(["silu", "gelu_tanh"]))
def test_norm_gate_up(rows, width, outputs, kind, activation):
    data, scale, dense = weight_of(kind, 2 * outputs, width)
    x = torch.randn(rows, width) * 3
    norm = torch.rand(width) * 4
    got = ops.norm_gate_up(x, norm, 1e-5, data, activation, scale)
    want = reference.norm_gate_up(x, norm, 1e-5, dense, activation)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, width=WIDTHS, outputs=OUTPUTS, kind=KINDS, has_bias=st.booleans())
def test_linear_residual(rows, width, outputs, kind, has_bias):
    data, scale, dense = weight_of(kind, outputs, width)
    x, residual = torch.randn(rows, width), torch.randn(rows, outputs)
    bias = torch.randn(outputs) if has_bias else None
    got = ops.linear_residual(x, data, bias, residual.clone(), scale)
    want = reference.linear_residual(x, dense, bias, residual)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 288), (20, 300), (2, 5, 64)])
def test_rms_norm(shape):
    x, weight = torch.randn(shape), torch.rand(shape[-1])
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("value", [-200.0, -88.0, 0.0, 88.0, 200.0])
def test_activations_of_large_gates_are_finite(value):
    x = torch.full((1, 16), value)
    weight = torch.cat((torch.eye(16), torch.eye(16)))
    for activation in ("silu", "gelu_tanh"):
        got = ops.norm_gate_up(x, None, 0.0, weight, activation)
        want = reference.norm_gate_up(x, None, 0.0, weight, activation)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_nan_in_one_row_stays_in_that_row():
    x = torch.randn(5, 64)
    weight = torch.randn(96, 64)
    clean = ops.norm_gate_up(x, torch.ones(64), 1e-5, weight, "silu")
    x[2] = float("nan")
    spoiled = ops.norm_gate_up(x, torch.ones(64), 1e-5, weight, "silu")
    assert spoiled[2].isnan().all()
    keep = [0, 1, 3, 4]
    assert torch.equal(spoiled[keep], clean[keep])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_rows_do_not_depend_on_the_batch_or_the_threads(kind):
    """Bit-equal from 1 to 16 rows. Above 16 the library's GEMM decides the order of summation."""
    data, scale, _ = weight_of(kind, 130, 300)
    x, norm = torch.randn(16, 300), torch.rand(300)
    together = ops.norm_linear(x, norm, 1e-5, data, None, scale)
    for rows in range(1, 16):
        assert torch.equal(ops.norm_linear(x[:rows], norm, 1e-5, data, None, scale), together[:rows])
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(ops.norm_linear(x, norm, 1e-5, data, None, scale), together)
    finally:
        torch.set_num_threads(num_threads)


def test_a_view_of_the_residual_stream_is_accepted():
    x = torch.randn(4, 3, 64)[:, 1]
    weight, residual = torch.randn(32, 64), torch.randn(4, 2, 32)[:, 0]
    got = ops.linear_residual(x, weight, None, residual)
    torch.testing.assert_close(got, reference.linear_residual(x, weight, None, residual), rtol=1e-4, atol=1e-5)


def test_refuses_an_int8_weight_without_scales():
    with pytest.raises(RuntimeError, match="scale belongs to int8"):
        ops.norm_linear(torch.randn(1, 16), None, 0.0, torch.zeros(4, 16, dtype=torch.int8))


def test_layers_refuse_rows_that_a_gpu_kernel_would_misread():
    weight = dense_weight(torch.zeros(16, 8))
    apart = torch.zeros(3, 2, 8)[:, 1]
    for product in (
        lambda x: layer_ops.norm_linear(x, None, 0.0, weight, None),
        lambda x: layer_ops.norm_linear_argmax(x, None, 0.0, weight),
        lambda x: layer_ops.norm_gate_up(x, None, 0.0, weight, "silu"),
        lambda x: layer_ops.linear_residual(x, weight, None, torch.zeros(3, 16)),
    ):
        product(apart.contiguous())
        with pytest.raises(AssertionError, match="must be contiguous"):
            product(apart)
