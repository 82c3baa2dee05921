"""Speculation changes no distribution: exact prefixes for greedy, chi-square for random."""

import pytest
import torch

from graphrunner.kernels.noise import gumbel_noise
from graphrunner.sampling.rejection import accept_greedy, accept_random, acceptance_uniforms

VOCAB = 5
COUNT = 20_000
LIMIT = 40.0  # chi-square with 4 degrees of freedom: 4e-8


def test_greedy_keeps_the_common_prefix():
    draft = torch.tensor([[7, 8, 9], [7, 8, 9], [7, 8, 9], [7, -1, -1]])
    target = torch.tensor([[7, 8, 9, 1], [7, 5, 9, 1], [6, 8, 9, 1], [7, 2, 3, 4]])
    kept = accept_greedy(draft, target)
    assert kept.num_accepted.tolist() == [3, 1, 0, 1]
    assert kept.token_ids.tolist() == [[7, 8, 9, 1], [7, 5, -1, -1], [6, -1, -1, -1], [7, 2, -1, -1]]
    assert kept.token_ids.dtype == torch.int32


def chi_square(token_ids: torch.Tensor, probs: torch.Tensor) -> float:
    counts = torch.bincount(token_ids.long(), minlength=VOCAB).double()
    expected = probs.double() * len(token_ids)
    is_possible = expected > 0
    assert counts[~is_possible].sum() == 0
    return float(((counts - expected)[is_possible] ** 2 / expected[is_possible]).sum())


@pytest.mark.parametrize("has_probs", [True, False])
def test_random_tokens_follow_the_target(has_probs):
    g = torch.Generator().manual_seed(2)
    target = torch.tensor([[0.5, 0.2, 0.2, 0.1, 0.0], [0.1, 0.1, 0.1, 0.1, 0.6], [0.2] * 5])
    q = torch.tensor([[0.1, 0.6, 0.1, 0.1, 0.1], [0.3, 0.3, 0.2, 0.1, 0.1]])
    draft = torch.stack([torch.multinomial(row, COUNT, replacement=True, generator=g) for row in q], dim=1)
    if not has_probs:
        draft = torch.tensor([1, 4]).expand(COUNT, 2)
    noise = gumbel_noise(torch.arange(COUNT), torch.zeros(COUNT, dtype=torch.int64), torch.arange(VOCAB))
    kept = accept_random(
        draft,
        q.expand(COUNT, 2, VOCAB) if has_probs else None,
        target.expand(COUNT, 3, VOCAB),
        torch.rand(COUNT, 2, generator=g),
        lambda _: noise,
    )
    assert chi_square(kept.token_ids[:, 0], target[0]) < LIMIT
    assert chi_square(kept.token_ids[kept.num_accepted >= 1, 1], target[1]) < LIMIT
    assert chi_square(kept.token_ids[kept.num_accepted >= 2, 2], target[2]) < LIMIT
    expected = torch.minimum(target[0], q[0]).sum() if has_probs else target[0, 1]
    assert float((kept.num_accepted >= 1).float().mean()) == pytest.approx(float(expected), abs=0.015)


def test_equal_distributions_accept_everything_and_no_draft_adds_one_token():
    probs = torch.tensor([0.3, 0.3, 0.4, 0.0, 0.0])
    draft = torch.tensor([[0, 2], [1, -1], [-1, -1]])
    kept = accept_random(
        draft, probs.expand(3, 2, VOCAB), probs.expand(3, 3, VOCAB), torch.full((3, 2), 0.999),
        lambda _: torch.zeros(3, VOCAB),
    )  # fmt: skip
    assert kept.num_accepted.tolist() == [2, 1, 0]
    assert kept.token_ids.tolist() == [[0, 2, 2], [1, 2, -1], [2, -1, -1]]


def test_a_token_the_target_rules_out_never_stands():
    target = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]).expand(1, 2, VOCAB)
    kept = accept_random(torch.tensor([[0]]), None, target, torch.zeros(1, 1), lambda _: torch.zeros(1, VOCAB))
    assert kept.token_ids.tolist() == [[1, -1]]


def test_uniforms_are_uniform_and_of_their_seed():
    uniforms = acceptance_uniforms(torch.arange(2000), torch.arange(4).expand(2000, 4))
    assert uniforms.shape == (2000, 4) and float(uniforms.min()) >= 0.0 and float(uniforms.max()) < 1.0
    assert chi_square((uniforms.flatten() * VOCAB).long(), torch.full((VOCAB,), 0.2)) < LIMIT
    again = acceptance_uniforms(torch.tensor([7]), torch.tensor([[2]]))
    assert float(again[0, 0]) == float(uniforms[7, 2])
