"""Comparisons of the graph check: what is rounding, what is not."""

import torch

from graphrunner.engine.check.compare import are_ties, is_bit_equal, row_difference


def test_rows_that_differ_are_named() -> None:
    right = torch.randn(5, 8)
    other = torch.cat((right * (1 + 1e-5), torch.full((3, 8), float("nan"))))
    assert row_difference(right, other) is None
    other[3, 2] += 1.0
    other[1, 0] = float("nan")
    difference = row_difference(right, other)
    assert difference.rows == (1, 3) and difference.num_rows == 5 and difference.error == float("inf")
    assert "2 of 5 rows differ" in str(difference)
    assert row_difference(right, other, rows=[0, 2, 4]) is None
    assert row_difference(right, other, rows=[0, 3]).rows == (3,)


def test_what_was_masked_on_both_sides_is_the_same() -> None:
    right = torch.tensor([[1.0, -torch.inf], [torch.nan, 2.0]])
    assert row_difference(right, right.clone()) is None
    assert row_difference(right, torch.tensor([[1.0, 0.0], [torch.nan, 2.0]])).rows == (0,)


def test_the_tolerance_follows_the_dtype() -> None:
    right, other = torch.ones(1, 4), torch.full((1, 4), 1.01)
    assert row_difference(right, other) is not None
    assert row_difference(right, other, torch.bfloat16) is None
    assert row_difference(torch.zeros(0, 4), torch.zeros(0, 4)) is None


def test_ties() -> None:
    logits = torch.tensor([[3.0, 2.9999, -1.0], [0.0, 5.0, 1.0]])
    picked = torch.tensor([0, 1])
    assert are_ties(logits, picked, torch.tensor([1, 1]), torch.float32)
    assert not are_ties(logits, picked, torch.tensor([1, 2]), torch.float32)
    assert not are_ties(logits, picked, torch.tensor([7, 1]), torch.float32)
    # Of a verify step only the first token that differs counts: the rest follows from it.
    blocks = torch.tensor([[0, 1]])
    assert are_ties(logits, blocks, torch.tensor([[1, -1]]), torch.float32)
    assert not are_ties(logits, blocks, torch.tensor([[0, -1]]), torch.float32)


def test_bits() -> None:
    values = torch.tensor([1.0, torch.nan])
    assert is_bit_equal(values, values.clone()) and not is_bit_equal(values, torch.tensor([1.0, 2.0]))
    assert is_bit_equal(torch.tensor([1, 2]), torch.tensor([1, 2]))
