"""The likeliest few tokens of each row, against torch."""

import pytest
import torch

from graphrunner.kernels.noise import gumbel_noise
from graphrunner.kernels.triton import likeliest
from graphrunner.kernels.triton.sample import SamplingRows
from graphrunner.sampling.pick import RowParams, filter_thresholds, finite_logits


@pytest.mark.parametrize(("size", "count"), [(3, 3), (1024, 2), (5000, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_tokens_match_torch(device, size: int, count: int, dtype: torch.dtype) -> None:
    scores = torch.stack([torch.randperm(size) for _ in range(4)]).to(dtype).to(device) * 0.01
    ids = torch.randperm(3 * size, device=device)[:size].int()
    tokens, chances = likeliest.top_tokens(scores, count, ids)
    # Of equals, which a short dtype has, the lowest comes first: so does a stable sort.
    wanted = scores.float().sort(dim=1, descending=True, stable=True).indices[:, :count]
    assert tokens.equal(ids[wanted])
    torch.testing.assert_close(chances, scores.float().log_softmax(1).gather(1, wanted))


@pytest.mark.parametrize("filler", [float("nan"), float("-inf")])
def test_what_counts_for_nothing_comes_last_and_once(device, filler: float) -> None:
    scores = torch.full((2, 2500), filler, device=device)
    scores[0, 2100] = -4.0
    tokens, chances = likeliest.top_tokens(scores, 3, torch.arange(2500, dtype=torch.int32, device=device))
    assert tokens.tolist() == [[2100, 0, 1], [0, 1, 2]]
    assert chances[0, 0] == 0.0 and chances[0, 1] < -1e30 and not bool(chances.isnan().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noisy_scores_match_the_formula(device, dtype: torch.dtype) -> None:
    size = 2600
    logits = (torch.randn(5, size, device=device) * 3).to(dtype)
    logits[1, 7], logits[3, 2599] = float("nan"), float("-inf")
    ids = torch.randperm(3 * size, device=device)[:size].int()
    temperature, top_p, min_p = torch.tensor(
        [[0.0, 0.7, 1.0, 1.3, 0.5], [1.0, 1.0, 0.9, 1.0, 1.0], [0.0, 0.0, 0.0, 0.02, 0.0]], device=device
    )
    top_k = torch.tensor([0, 40, 0, 0, 0], dtype=torch.int32, device=device)
    seeds = torch.tensor([1, 2**40 + 3, 7, 9, 11], device=device)
    positions = torch.tensor([3, 4, 5, 6, 7], device=device)
    rows = SamplingRows(temperature, top_k, top_p, min_p, seeds)
    scores = likeliest.noisy_scores(logits, ids, rows, positions)
    finite = finite_logits(logits)
    inverse = 1.0 / torch.where(temperature > 0, temperature, 1.0)[:, None]
    noisy = finite * inverse + gumbel_noise(seeds, positions, ids)
    is_kept = finite >= filter_thresholds(
        finite, inverse, RowParams(temperature, top_k, top_p, min_p, seeds, positions)
    )
    wanted = torch.where(temperature[:, None] > 0, torch.where(is_kept, noisy, -torch.inf), finite)
    # Thresholds of bfloat16 logits and sums are found in other ways: a token on the border may differ.
    differs = scores.isinf() != wanted.isinf()
    assert int(differs.sum(1).max()) <= 2
    torch.testing.assert_close(scores[~differs], wanted[~differs], rtol=1e-6, atol=1e-6)
