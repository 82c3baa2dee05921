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


def test_unknown_widths_are_tried_twice_and_old_ones_again() -> None:
    controller = DraftController([2, 3, 5], [1, 2, 4, 8])
    times = {1: 10.0, 2: 30.0, 3: 31.0, 5: 32.0}
    chosen = []
    accept(controller, 1, 0.3)
    for _ in range(400):
        chosen.append(controller.choose_width([1], [4]))
        controller.add_step(1, chosen[-1], times[chosen[-1]])
    assert chosen[:8] == [1, 1, 2, 2, 3, 3, 5, 5]
    assert chosen.count(1) > 380 and {2, 3, 5} <= set(chosen[8:])


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
