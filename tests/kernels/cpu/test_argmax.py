"""The greedy token, equal to torch.argmax in every corner."""

import pytest
import torch

from graphrunner.kernels.cpu import ops


@pytest.mark.parametrize("width", [1, 7, 64, 4095, 4096, 4097, 32000])
@pytest.mark.parametrize("rows", [1, 8])
def test_equals_torch(rows, width):
    logits = torch.randn(rows, width)
    assert torch.equal(ops.argmax(logits), logits.argmax(-1))


@pytest.mark.parametrize("where", [(5, 9000), (4096, 4097), (63, 64)])
def test_first_of_equals(where):
    logits = torch.zeros(2, 10000)
    logits[1, list(where)] = 3.0
    assert ops.argmax(logits).tolist() == [0, where[0]]


def test_nan_and_infinity():
    logits = torch.randn(4, 9000)
    logits[0, 8000] = float("nan")
    logits[1] = float("-inf")
    logits[2, 5000] = float("inf")
    logits[3, [10, 7000]] = float("nan")
    assert torch.equal(ops.argmax(logits), logits.argmax(-1))
