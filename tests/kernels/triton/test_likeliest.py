"""The likeliest few tokens of each row, against torch."""

import pytest
import torch

from graphrunner.kernels.triton import likeliest


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
