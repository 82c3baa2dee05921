"""Deterministic projections: a row's bits do not depend on the rows beside it."""

import pytest
import torch

from graphrunner.core.errors import ConfigError
from graphrunner.kernels import reference
from graphrunner.kernels.packed_weight import dense_weight
from graphrunner.kernels.triton import invariant_linear
from graphrunner.kernels.triton.linear_config import LinearMode, LinearShape

EPS = 1e-5


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-4 if found.dtype is torch.float32 else 3e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("sizes", "dtype"), [((48, 48), torch.float32), ((80, 128), torch.bfloat16)], ids=str)
def test_a_row_has_the_same_bits_in_every_batch(sizes, dtype, device):
    num_outputs, width = sizes
    torch.manual_seed(0)
    x = torch.randn(70, width, device=device).to(dtype)
    residual = torch.randn(70, num_outputs, device=device).to(dtype)
    norm = torch.rand(width, device=device) + 0.5
    bias = torch.randn(num_outputs, device=device).to(dtype)
    weight = dense_weight((torch.randn(num_outputs, width, device=device) * 0.1).to(dtype))
    pairs = dense_weight((torch.randn(2 * num_outputs, width, device=device) * 0.1).to(dtype))
    ops = {
        "linear": lambda rows: invariant_linear.norm_linear(x[rows], norm, EPS, weight, bias),
        "gated": lambda rows: invariant_linear.norm_gate_up(x[rows], norm, EPS, pairs, "silu"),
        "residual": lambda rows: invariant_linear.linear_residual(x[rows], weight, bias, residual[rows].clone()),
    }
    data = weight.data.float()
    expected = {
        "linear": reference.norm_linear(x.float(), norm, EPS, data, bias.float()),
        "gated": reference.norm_gate_up(x.float(), norm, EPS, pairs.data.float(), "silu"),
        "residual": reference.linear_residual(x.float(), data, bias.float(), residual.float()),
    }
    for name, run in ops.items():
        whole = run(slice(0, 70))
        _close(whole, expected[name])
        for rows in (slice(0, 1), slice(69, 70), slice(30, 34)):
            assert torch.equal(run(rows), whole[rows]), (name, rows)


def test_a_long_prompt_is_several_launches(device, monkeypatch):
    monkeypatch.setattr(invariant_linear, "_ROWS_PER_LAUNCH", 4)
    x = torch.randn(9, 48, device=device)
    weight = dense_weight(torch.randn(32, 48, device=device))
    _close(invariant_linear.norm_linear(x, None, 0.0, weight, None), x @ weight.data.T)


def test_the_configuration_follows_from_the_weight_alone():
    for num_outputs, num_inputs in ((1024, 4096), (151936, 1024), (64, 48), (4096, 14336)):
        for mode in (LinearMode.PLAIN, LinearMode.GATED, LinearMode.RESIDUAL):
            config = invariant_linear.invariant_config(LinearShape(mode, num_outputs, num_inputs), torch.bfloat16)
            assert num_inputs % (config.slices * config.block_k) == 0 and config.block_k >= 16
            assert config.has_fixed_rows and config.block_b == invariant_linear.ROWS_PER_TILE
    with pytest.raises(ConfigError, match="deterministic=True: needs hidden sizes"):
        invariant_linear.invariant_config(LinearShape(LinearMode.PLAIN, 64, 40), torch.bfloat16)
