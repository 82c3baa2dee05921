"""A part of the server fails once, at its n-th call: never a hang, never a leak, never half an answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from failing import CAPTURE, PLACES, Scope, Tried, failing, trial

from graphrunner.core.errors import CaptureError
from graphrunner.engine.model_runner import ModelRunner

REQUEST_PLACES = [name for name, (_, _, scope) in PLACES.items() if scope is Scope.REQUEST]
ENGINE_PLACES = [name for name, (_, _, scope) in PLACES.items() if scope is not Scope.REQUEST]


def test_failures_of_one_request(start: Callable[[], Tried]) -> None:
    tried = start()
    for place in REQUEST_PLACES:
        for nth in (1, 2, 5):
            _, wrong = trial(tried, place, nth)
            assert wrong == [], f"{place}, call {nth}"


@pytest.mark.parametrize("place", ENGINE_PLACES)
def test_failures_of_the_engine(start: Callable[[], Tried], place: str) -> None:
    for nth in (1, 4):
        injection, wrong = trial(start(), place, nth)
        assert injection.has_failed and wrong == [], f"{place}, call {nth}"


@pytest.mark.parametrize("nth", [1, 3])
def test_a_failed_capture_leaves_the_engine_whole(start: Callable[[], Tried], nth: int) -> None:
    whole = start().canary()
    with failing(*CAPTURE, nth, CaptureError) as injection:
        tried = start()
    assert injection.has_failed and tried.canary() == whole and tried.is_whole()


def test_a_capture_that_fails_for_no_reason_we_know_is_one_line_and_no_server(start: Callable[[], Tried]) -> None:
    with failing(*CAPTURE, 2) as injection:
        tried = start()
    assert injection.has_failed and tried.ends()
    assert str(tried.failure) == "InjectedError: call 2 of capture_one" and tried.failure.exit_code == 2


def test_a_lost_device_ends_the_engine(start: Callable[[], Tried]) -> None:
    """CUDA answers every later call with the same error: no step can follow, so none is tried."""

    class LostError(RuntimeError):
        def __init__(self, text: str) -> None:
            super().__init__("CUDA error: an illegal memory access was encountered\nmore lines")

    tried = start()
    with failing(ModelRunner, "forward", 3, LostError):
        status, _ = tried.post("/v1/completions", {"prompt": "a", "max_tokens": 20, "ignore_eos": True})
        assert status == 503 and tried.ends()
    assert str(tried.failure) == "the device is lost: CUDA error: an illegal memory access was encountered"
