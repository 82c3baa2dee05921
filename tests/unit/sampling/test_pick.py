"""The pure functions against straightforward references."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrunner.kernels.noise import gumbel_noise, row_keys
from graphrunner.kernels.reference_gpu import sample_tokens
from graphrunner.sampling.pick import RowParams, filter_thresholds, pick_greedy, pick_random
from graphrunner.sampling.pick_on_host import _gumbel, pick_random_on_host

PICKERS = (pick_random, pick_random_on_host)


def rows(count: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> RowParams:
    return RowParams(
        torch.full((count,), temperature),
        torch.full((count,), top_k, dtype=torch.int32),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
        torch.arange(count) * 7919 + 13,
        torch.arange(count) % 5,
    )


def kept_by_reference(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Temperature, top-k, top-p over the rest, min-p; in plain Python; no two logits are equal."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    weights = [math.exp((logits[token] - logits[order[0]]) / temperature) for token in order]
    if top_k:
        order, weights = order[:top_k], weights[:top_k]
    kept, before, total = set(), 0.0, sum(weights)
    for token, weight in zip(order, weights, strict=True):
        if not kept or (before < top_p * total and weight >= min_p):
            kept.add(token)
        before += weight
    return kept


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1000),
    st.floats(0.2, 3.0),
    st.integers(0, 12),
    st.floats(0.05, 1.0),
    st.sampled_from([0.0, 0.1, 0.6]),
)
def test_filters_keep_what_the_definition_keeps(seed, temperature, top_k, top_p, min_p):
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)) * 2
    params = rows(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    threshold = filter_thresholds(logits, torch.tensor([[1.0 / temperature]]), params)
    kept = set((logits >= threshold)[0].nonzero()[:, 0].tolist())
    assert kept == kept_by_reference(logits[0].double().tolist(), temperature, top_k, top_p, min_p)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([37, 1500, 5000]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_host_and_static_pick_the_same(seed, vocab_size, dtype):
    g = torch.Generator().manual_seed(seed)
    count = 6
    logits = (torch.randn(count, vocab_size, generator=g) * 3).to(dtype)

    def some(share: float) -> torch.Tensor:
        return torch.rand(count, generator=g) < share

    params = RowParams(
        torch.rand(count, generator=g) * 2 * some(0.8),
        torch.randint(2, 60, (count,), generator=g, dtype=torch.int32) * some(0.5).int(),
        torch.where(some(0.5), torch.rand(count, generator=g) * 0.98 + 0.01, torch.ones(count)),
        torch.rand(count, generator=g) * some(0.3),
        torch.randint(-(2**60), 2**60, (count,), generator=g),
        torch.randint(0, 1000, (count,), generator=g),
    )
    assert pick_random(logits, params).tolist() == pick_random_on_host(logits, params).tolist()


def test_gpu_twin_picks_the_same():
    logits = torch.randn(40, 97, generator=torch.Generator().manual_seed(3)) * 3
    for settings_of in (
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 0.4, "top_k": 9, "top_p": 0.9},
    ):
        p = rows(40, **settings_of)
        twin = sample_tokens(logits.clone(), p.temperature, p.top_k, p.top_p, p.min_p, p.seeds, p.positions)
        assert pick_random(logits, p).tolist() == twin.tolist()


def test_host_noise_has_the_same_bits():
    seeds, positions = torch.tensor([5, -7, 2**62]), torch.tensor([3, 900, 0])
    noise = gumbel_noise(seeds, positions, torch.arange(9000))
    first, second = row_keys(seeds, positions)
    for row in range(3):
        host = _gumbel(int(first[row]), int(second[row]), None, 9000)
        assert np.array_equal(host.view(np.int32), noise[row].numpy().view(np.int32))


@pytest.mark.parametrize("pick", PICKERS)
@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"top_p": 0.75}, {"min_p": 0.2}, {"temperature": 0.5}], ids=str)
def test_frequencies_follow_the_filtered_softmax(pick, how):
    """Chi-square over 4000 draws; 1e-5 tail."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.5])
    count = 4000
    picked = pick(logits.expand(count, 6), rows(count, **how)).tolist()
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | how
    kept = kept_by_reference(logits.tolist(), **full)
    weights = {token: math.exp(float(logits[token]) / full["temperature"]) for token in kept}
    assert set(picked) <= kept
    total = sum(weights.values())
    statistic = sum(
        (picked.count(token) - count * weight / total) ** 2 / (count * weight / total)
        for token, weight in weights.items()
    )
    assert statistic < 32.0


@pytest.mark.parametrize("pick", PICKERS)
def test_tiny_top_p_and_full_min_p_are_greedy(pick):
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(1))
    best = logits.argmax(-1).tolist()
    assert pick(logits, rows(50, top_p=1e-6)).tolist() == best
    assert pick(logits, rows(50, min_p=1.0)).tolist() == best
    assert pick(logits, rows(50, temperature=0.0, top_k=7)).tolist() == best


@pytest.mark.parametrize("pick", PICKERS)
def test_numbers_that_are_not_finite_never_crash_or_win(pick):
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan, 1.0, 5.0, -inf], [nan] * 4, [-inf] * 4, [inf, nan, 0.0, 0.0], [1.0, nan, inf, inf]])
    for how in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}):
        picked = pick(logits, rows(5, **how)).tolist()
        assert picked[0] in (1, 2) and picked[1] == 0 and picked[2] == 0 and picked[3] == 0 and picked[4] in (2, 3)
    assert pick_greedy(logits).tolist() == [2, 0, 0, 0, 2]


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.zeros(2, 50)
    logits[1, [9, 31]] = 1.0
    assert pick_greedy(logits.bfloat16()).tolist() == [0, 9]
