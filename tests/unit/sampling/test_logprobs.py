"""Logprobs of a row are the same bits alone and beside others, and the same tokens however many are asked for."""

from collections.abc import Iterator

import pytest
import torch

from graphrunner.sampling.logprobs import ScoredTokens, entries_of, score_tokens

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.cuda)]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def columns(scored: ScoredTokens) -> list[torch.Tensor]:
    return [getattr(scored, name) for name in ScoredTokens.__slots__]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [97, 50_257])
@pytest.mark.usefixtures("two_threads")
def test_a_row_alone_is_a_row_among_others(device: str, vocab_size: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, vocab_size, device=device) * 3
    logits[4:] = logits[4:].bfloat16().float()  # with equals
    ids = torch.arange(9, device=device)
    together = score_tokens(logits, ids, 20)
    for row in range(9):
        alone = score_tokens(logits[row : row + 1], ids[row : row + 1], 20)
        for one, many in zip(columns(alone), columns(together), strict=True):
            assert torch.equal(one[0], many[row]), row


@pytest.mark.parametrize("device", DEVICES)
def test_fewer_are_the_first_of_more_and_of_equals_the_lowest_ids(device: str) -> None:
    torch.manual_seed(1)
    logits = torch.randint(-3, 3, (4, 300), device=device).float()
    logits[1] = -0.0
    logits[1, ::2] = 0.0
    logits[2, 5:] = -torch.inf
    ids = torch.zeros(4, dtype=torch.int64, device=device)
    many = score_tokens(logits, ids, 20)
    wanted = logits.cpu().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(many.top_ids.cpu(), wanted.indices[:, :20])
    for count in (0, 1, 3):
        few = entries_of(score_tokens(logits, ids, count).start_copy().wait(), [count] * 4)
        assert few == entries_of(many.start_copy().wait(), [count] * 4)


def test_logits_that_differ_by_less_than_their_logprobs_keep_their_order() -> None:
    """Sorted by what is left after rounding, another token would be cut off where somebody beside asks for more."""
    logits = torch.full((1, 64), -50.0)
    logits[0, 9], logits[0, 20], logits[0, 10] = 100.0, 1.0000001, 1.0
    (entry,) = entries_of(score_tokens(logits, torch.tensor([9]), 3).start_copy().wait(), [3])
    assert [token for token, _ in entry.top] == [9, 20, 10] and entry.top[1][1] == entry.top[2][1]
