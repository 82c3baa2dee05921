"""The width of a step follows measured times and measured acceptance, nothing else."""

import random

import pytest

from graphrunner.speculative.draft_controller import DraftController, widths_for


def measured(costs: dict[int, float], num_reqs: int = 1, **options: object) -> DraftController:
    controller = DraftController([width for width in costs if width > 1], [1, 2, 4, 8], **options)
    for width, ms in costs.items():
        for _ in range(2):
            controller.add_step(num_reqs, width, ms)
    return controller


def accept(controller: DraftController, row: int, chance: float, num_rounds: int = 200, k: int = 4) -> None:
    rng = random.Random(row)
    for _ in range(num_rounds):
        stands = next((place for place in range(k) if rng.random() >= chance), k)
        controller.add_round(row, k, stands)


@pytest.mark.parametrize(("chance", "width"), [(0.95, 5), (0.5, 2), (0.05, 1)])
def test_acceptance_decides(chance, width) -> None:
    controller = measured({1: 10.0, 2: 11.5, 3: 14.0, 5: 17.0})
    accept(controller, 1, chance)
    assert controller.choose_width([1], [4]) == width
    assert controller.chance(1) == pytest.approx(chance, abs=0.25)


def test_cost_decides() -> None:
    free, dear = measured({1: 10.0, 2: 10.1, 5: 10.2}), measured({1: 10.0, 2: 25.0, 5: 60.0})
    for controller in (free, dear):
        accept(controller, 1, 0.7)
    assert free.choose_width([1], [4]) == 5 and dear.choose_width([1], [4]) == 1


def test_batch_size_decides() -> None:
    controller = measured({1: 10.0, 5: 11.0})
    for width, ms in ((1, 11.0), (5, 40.0)):
        for _ in range(2):
            controller.add_step(8, width, ms)
    for row in range(1, 9):
        accept(controller, row, 0.7)
    assert controller.choose_width([1], [4]) == 5
    assert controller.choose_width(list(range(1, 9)), [4] * 8) == 1
    assert controller.choose_width(list(range(1, 10)), [4] * 9) == 1, "more requests than the largest recorded size"
    disabled = measured({1: 10.0, 5: 10.0}, num_reqs=2, disable_at=2)
    assert disabled.choose_width([1, 2], [4, 4]) == 1


CHEAP = {1: 10.0, 2: 11.5, 3: 12.5, 5: 13.5}
DEAR = {1: 10.0, 2: 18.0, 3: 25.0, 5: 34.0}


def played(
    controller: DraftController, chance: float, num_rounds: int, *, times: dict[int, float] = CHEAP, num_reqs: int = 1
) -> list[int]:
    """Widths of rounds whose drafts stand by chance. As drafts of a device are: a round verifies what the one before
    proposed, and its time tells something where it proposed as many again."""
    rows, rng, width, widths = list(range(1, num_reqs + 1)), random.Random(7), 1, []
    for _ in range(num_rounds):
        proposed = controller.choose_width(rows, [4] * num_reqs)
        for row in rows if width > 1 else ():
            stands = next((place for place in range(width - 1) if rng.random() >= chance), width - 1)
            controller.add_round(row, width - 1, stands)
        if proposed == width:
            controller.add_step(num_reqs, width, times[width] * rng.uniform(0.97, 1.03))
        widths.append(width)
        width = proposed
    return widths


def usual(widths: list[int]) -> int:
    """What most of the last rounds had."""
    return max(set(widths), key=widths[-20:].count)


def test_unknown_widths_are_tried_twice() -> None:
    controller = DraftController([2, 3, 5], [1, 2, 4, 8])
    assert sorted(set(played(controller, 0.3, 12, times=DEAR))) == [1, 2, 3, 5]
    assert all(controller.cost_ms(1, width) is not None for width in CHEAP)


@pytest.mark.parametrize(("chance", "times", "best"), [(0.7, CHEAP, 5), (0.3, DEAR, 1)])
def test_a_steady_engine_seldom_tries_other_widths(chance, times, best) -> None:
    controller = DraftController([2, 3, 5], [1, 2, 4, 8])
    played(controller, chance, 300, times=times)
    widths = played(controller, chance, 8000, times=times)
    others = [width for width in widths if width != best]
    assert 0 < len(others) <= 0.01 * len(widths)


def test_every_width_of_a_steady_engine_is_measured_again() -> None:
    controller = DraftController([2, 3, 5], [1, 2, 4, 8])
    played(controller, 0.7, 8000)
    cheap = CHEAP | {2: 1.0}
    assert usual(played(controller, 0.7, 12000, times=cheap)) == 2, "width 2 has become the cheapest by far"


def test_widths_follow_a_text_that_becomes_harder_and_easier_again() -> None:
    controller = DraftController([2, 3, 5], [1, 2, 4, 8])
    times = DEAR | {5: 16.0}
    assert usual(played(controller, 0.8, 3000, times=times)) == 5
    assert usual(played(controller, 0.05, 80, times=times)) == 1
    assert played(controller, 0.05, 3000, times=times).count(1) > 2950
    assert usual(played(controller, 0.8, 800, times=times)) == 5


def test_speculation_ends_at_batches_where_it_does_not_pay_and_comes_back() -> None:
    controller = DraftController([2, 3, 5], [1, 2, 4, 8])
    for _ in range(3):
        assert usual(played(controller, 0.7, 80)) == 5
        assert usual(played(controller, 0.4, 80, times=DEAR, num_reqs=8)) == 1


def test_one_pause_is_not_a_cost() -> None:
    controller = measured({1: 10.0, 5: 12.0})
    controller.add_step(1, 5, 5000.0)
    assert controller.cost_ms(1, 5) == pytest.approx(13.2)


def test_rows_with_fewer_drafts_and_none() -> None:
    controller = measured({1: 10.0, 2: 10.0, 3: 10.1, 5: 10.2}, num_reqs=2)
    for row in (1, 2):
        accept(controller, row, 0.9)
    assert controller.choose_width([1, 2], [0, 0]) == 1
    assert controller.choose_width([1, 2], [1, 0]) == 2
    assert controller.choose_width([1, 2], [3, 1]) in (3, 5)
    fixed = DraftController([5], [1, 2], is_adaptive=False)
    assert fixed.choose_width([1], [2]) == 5 and fixed.width_for(9) == 5


def test_recorded_widths() -> None:
    assert widths_for(4, is_adaptive=True) == (2, 3, 5)
    assert widths_for(7, is_adaptive=True) == (2, 3, 5, 8)
    assert widths_for(1, is_adaptive=True) == (2,) and widths_for(16, is_adaptive=True) == (2, 3, 5, 9, 17)
    assert widths_for(5, is_adaptive=False) == (6,)
