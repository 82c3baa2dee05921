"""The step tuner's choices, with times that are made up."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from benchmarks import step_candidates, step_tuning
from benchmarks.kernel_tuning import MODELS, Shape
from benchmarks.step_candidates import Step
from graphrunner.kernels.triton import linear_config, runtime
from graphrunner.kernels.triton.linear_config import LinearConfig, LinearKind, config_from_row
from graphrunner.kernels.triton.tuned_configs import TUNED_ATTENTION

SHAPE = Shape.of(MODELS["8B"])


@pytest.fixture
def tune(monkeypatch, request) -> Callable[..., dict[str, tuple]]:
    """Tunes on a card whose steps take as many microseconds as the given function says of all that is in use."""
    request.addfinalizer(linear_config._measured_or_default.cache_clear)
    monkeypatch.setattr(linear_config, "_overrides", {})
    monkeypatch.setattr(step_tuning, "TUNED_ATTENTION", dict(TUNED_ATTENTION))
    monkeypatch.setattr(runtime, "device_key", lambda device: "sm90x132")
    monkeypatch.setattr(runtime, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(runtime, "has_tensor_descriptors", lambda device: True)
    monkeypatch.setattr(step_tuning, "Model", lambda shape, num_requests: None)
    monkeypatch.setattr(step_candidates, "weight_copies", lambda *where: [])

    def alone(problem, config: LinearConfig, weights: list) -> SimpleNamespace:
        return SimpleNamespace(time_us=float(config.num_stages + config.block_n))

    monkeypatch.setattr(step_candidates, "time_config", alone)

    def run(steps: Sequence[str], time_of: Callable[[list[LinearConfig]], float]) -> dict[str, tuple]:
        def recorded(model: None, step: Step) -> float:
            return time_of([step.linear_config(linear) for linear in SHAPE.linears])

        monkeypatch.setattr(step_tuning, "recorded", recorded)
        monkeypatch.setattr(step_tuning, "heated_us", lambda us: us)
        monkeypatch.setattr(step_tuning, "relative_time", lambda us, other_us: us / other_us)
        pool = SimpleNamespace(map=lambda function, jobs: [])
        return step_tuning.tune_shape("8B", SHAPE, [Step.parse(step) for step in steps], 2, pool)

    return run


@pytest.mark.parametrize("steps", [("1", "96"), ("96", "1")], ids=["rising", "falling"])
def test_each_step_starts_from_its_own_row_and_ends_with_what_is_fastest(tune, steps) -> None:
    met: list[list[LinearConfig]] = []

    def time_of(configs: list[LinearConfig]) -> float:
        met.append(configs)
        return sum(10.0 if config.num_stages == 2 else 11.0 for config in configs)

    rows = tune(steps, time_of)
    kinds = {config.kind for config in met[steps.index("1")]}
    assert kinds == {LinearKind.VECTOR}, "what is in use with one row"
    assert rows and all(config_from_row(row).num_stages == 2 for row in rows.values())


def test_what_does_not_win_twice_is_not_kept(tune) -> None:
    seen: list[list[LinearConfig]] = []

    def time_of(configs: list[LinearConfig]) -> float:
        seen.append(configs)
        return 100.0 if seen.count(configs) > 1 or len(seen) == 1 else 90.0

    assert tune(["96"], time_of) == {}


def test_two_rows_are_offered_kernels_of_one_row_and_of_many(tune) -> None:
    heads: set[LinearKind] = set()

    def time_of(configs: list[LinearConfig]) -> float:
        heads.add(configs[-1].kind)
        return 100.0

    tune(["2"], time_of)
    assert heads >= {LinearKind.VECTOR, LinearKind.MMA, LinearKind.LIBRARY}
