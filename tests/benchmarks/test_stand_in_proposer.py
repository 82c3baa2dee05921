"""The stand-in draft is right as often as it says, however many drafts a round has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import pytest
import torch

from benchmarks.stand_in_proposer import ACCEPTANCE, evenly_wrong

NUM_PLACES = 1024
PROMPT_ENDS = (10, 33, 100)


@pytest.mark.parametrize("rounds", [[1], [2], [3], [4], [5], [8], [2, 3, 5, 5], [5, 1, 4]], ids=str)
@pytest.mark.parametrize("start", PROMPT_ENDS)
def test_each_draft_stands_as_often_as_asked(rounds: Sequence[int], start: int) -> None:
    """Over one answer near it, over many answers exactly."""
    is_wrong = evenly_wrong(64, NUM_PLACES).tolist()
    shares = torch.tensor([standing_by_expected(row, rounds, start) for row in is_wrong])
    assert shares.mean().item() == pytest.approx(1, abs=0.01)
    assert shares.std().item() < 0.03  # 0.06 were each place drawn by itself


def test_the_drafts_of_a_row_are_not_those_of_another() -> None:
    is_wrong = evenly_wrong(9, 200)
    assert is_wrong.shape == (9, 200)
    assert len({tuple(row) for row in is_wrong.tolist()}) == 9
    assert torch.equal(is_wrong, evenly_wrong(9, 200))


def standing_by_expected(is_wrong: Sequence[bool], rounds: Sequence[int], start: int) -> float:
    """Drafts that stand in an answer, as a share of those that `ACCEPTANCE` lets expect."""
    place, num_standing, expected = start, 0, 0.0
    for num_drafts in cycle(rounds):
        if place + num_drafts >= len(is_wrong):
            return num_standing / expected
        found = list(is_wrong[place : place + num_drafts])
        stands = found.index(True) if True in found else num_drafts
        num_standing += stands
        expected += sum(ACCEPTANCE**power for power in range(1, num_drafts + 1))
        place += stands + 1
    raise AssertionError("there are no rounds")
