"""What happens when a capture fails, at any place; and that nothing is recorded twice."""

import gc
import logging
from dataclasses import replace

import pytest
import torch
from fakes.world import World, solo_tokens

from graphrunner.config.engine_config import GraphBackend
from graphrunner.core.errors import CaptureError, ConfigError
from graphrunner.core.graph_miss import GraphMissReason
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardVariant, ShapeKey
from graphrunner.execution.registry import create_execution_backend

BACKENDS = [GraphBackend.RECORDING, GraphBackend.FULL, GraphBackend.BREAKABLE]
backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
KEY = ShapeKey(2, 2, ForwardVariant.LOGITS)
OTHER = ShapeKey(1, 1, ForwardVariant.LOGITS)


@backends
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_any_one_size_may_fail(backend: GraphBackend, size: int, caplog: pytest.LogCaptureFixture) -> None:
    world = World(backend=backend, prefill_sizes=None, fails_at=size)
    with caplog.at_level(logging.WARNING, logger="graphrunner"):
        world.capture()
    (record,) = caplog.records
    assert "3 of 12 shapes failed" in record.getMessage() and "this shape is cursed" in record.getMessage()
    assert len(world.account.report().failed) == 3
    world.model.fails_at = None
    lives = [world.new(5) for _ in range(size)]
    world.step(chunks=[(live, 5) for live in lives])
    world.step(decode=lives)
    assert world.last.miss.reason is GraphMissReason.CAPTURE_FAILED
    world.step(decode=lives[:1])
    assert (world.last.miss is None) == (size != 1)
    for live in lives:
        assert live.tokens[5:] == solo_tokens(live.tokens[:5], len(live.tokens) - 5)
    assert gc.isenabled()


def test_metadata_that_cannot_be_prepared_is_a_failed_capture() -> None:
    world = World(prefill_sizes=None)
    world.context.attention.prepare_metadata = lambda batch: 1 // (batch.num_reqs - 4)
    world.capture()
    assert {key.num_reqs for _, key, _ in world.account.report().failed} == {4}


@backends
def test_a_failed_key_stays_unrecorded(backend: GraphBackend, device: torch.device) -> None:
    execution = create_execution_backend(backend, device)
    state = torch.zeros(2, device=device)

    def fine() -> ModelOutput:
        return ModelOutput(logits=state + 1)

    calls = []

    def breaks() -> ModelOutput:
        calls.append(1)
        out = state * 2
        if backend is GraphBackend.RECORDING or len(calls) != 2:  # the warm-up after the first attempt
            raise ValueError("no\nway")
        return ModelOutput(logits=out)

    with execution.capture_session():
        execution.capture_one(KEY, fine)
        execution.capture_one(OTHER, fine)
        with pytest.raises(CaptureError, match=r"2t x 2r logits: ValueError: no$"):
            execution.capture_one(KEY, breaks)
    assert not execution.can_run(KEY) and len(calls) == (1 if backend is GraphBackend.RECORDING else 3)
    with execution.capture_session():
        stats = execution.capture_one(KEY, fine)
    assert execution.can_run(KEY) and stats.capture_ms > 0
    state.fill_(4)
    assert execution.replay(KEY).logits.tolist() == [5, 5]
    execution.close()
    execution.close()
    assert not execution.can_run(KEY)


@backends
def test_reset_undoes_warm_ups(backend: GraphBackend, device: torch.device) -> None:
    execution = create_execution_backend(backend, device)
    counter = torch.zeros(1, device=device)

    def forward() -> ModelOutput:
        counter.add_(1)
        return ModelOutput(logits=counter.clone())

    with execution.capture_session():
        execution.capture_one(KEY, forward, reset=counter.zero_)
    counter.zero_()
    assert [execution.replay(KEY).logits.item() for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("backend", [GraphBackend.FULL, GraphBackend.BREAKABLE], ids=lambda b: b.value)
def test_a_value_read_back_cannot_be_recorded(backend: GraphBackend, device: torch.device) -> None:
    execution = create_execution_backend(backend, device)
    state = torch.zeros(2, device=device)

    def reads() -> ModelOutput:
        return ModelOutput(logits=state + state.sum().item())

    with execution.capture_session(), pytest.raises(CaptureError):
        execution.capture_one(KEY, reads)
    with execution.capture_session():
        execution.capture_one(KEY, lambda: ModelOutput(logits=state + 1))
    assert execution.replay(KEY).logits.tolist() == [1, 1]


def test_capture_again_records_only_what_is_missing() -> None:
    world = World(prefill_sizes=None).capture()
    before = world.model.num_forwards
    world.capture()
    assert world.model.num_forwards == before


def test_progress_counts_every_key() -> None:
    world = World(prefill_sizes=None)
    said: list[tuple[str, int, int]] = []
    world.decode.capture(lambda name, done, total: said.append((name, done, total)))
    assert [done for _, done, _ in said] == list(range(13)) and {total for *_, total in said} == {12}
    assert said[0][0].startswith("decode_cuda_graph_runner 8t x 8r") and "MiB free" in said[0][0]


pooled = pytest.mark.parametrize("backend", [GraphBackend.FULL, GraphBackend.BREAKABLE], ids=lambda b: b.value)


@pooled
def test_only_the_first_key_is_warmed_up(backend: GraphBackend, device: torch.device) -> None:
    execution = create_execution_backend(backend, device)
    state, calls = torch.zeros(2, device=device), []

    def forward() -> ModelOutput:
        calls.append(1)
        return ModelOutput(logits=state + 1)

    counts = []
    with execution.capture_session():
        for num_reqs in (4, 2, 1):
            execution.capture_one(replace(KEY, num_tokens=num_reqs, num_reqs=num_reqs), forward)
            counts.append(len(calls))
            calls.clear()
    assert counts == [3, 1, 1]
    execution.close()
    with execution.capture_session():
        execution.capture_one(KEY, forward)
    assert len(calls) == 3, "nothing that the first set up is sure to be there after a close"


@pooled
def test_what_a_first_call_sets_up_is_set_up_outside_of_a_recording(
    backend: GraphBackend, device: torch.device
) -> None:
    execution = create_execution_backend(backend, device)
    counter, made, resets = torch.zeros(1, device=device), [], []

    def forward() -> ModelOutput:
        counter.add_(1)
        if not made:
            made.append(counter.sum().item())  # as a library that asks for the device's answer at its first call
        return ModelOutput(logits=counter.clone())

    def reset() -> None:
        resets.append(1)
        counter.zero_()

    with execution.capture_session():
        execution.capture_one(OTHER, lambda: ModelOutput(logits=counter + 1))
        stats = execution.capture_one(KEY, forward, reset)
    assert len(resets) == 2, "after the attempt that broke, and after the warm-up"
    assert made == [1.0] and stats.num_nodes == 2
    counter.zero_()
    assert [execution.replay(KEY).logits.item() for _ in range(3)] == [1, 2, 3]
    assert execution.replay(OTHER).logits.item() == 4


@pooled
def test_a_recording_that_breaks_is_given_back_before_the_next_attempt(
    backend: GraphBackend, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = create_execution_backend(backend, device)
    events: list[str] = []
    made = type(execution)._new_recording

    def new_recording(self: object) -> object:
        recording = made(self)
        release = recording.release
        events.append("new")
        recording.release = lambda: (events.append("released"), release())
        return recording

    state = torch.zeros(2, device=device)

    def breaks() -> ModelOutput:
        events.append("call")
        if events.count("call") != 2:
            raise KeyboardInterrupt if events.count("call") == 3 else ValueError("no")
        return ModelOutput(logits=state + 1)

    with execution.capture_session():
        execution.capture_one(OTHER, lambda: ModelOutput(logits=state + 1))
        monkeypatch.setattr(type(execution), "_new_recording", new_recording)
        with pytest.raises(KeyboardInterrupt):
            execution.capture_one(KEY, breaks)
    assert events == ["new", "call", "released", "call", "new", "call", "released"]
    assert not execution.can_run(KEY) and execution.can_run(OTHER)
    state.fill_(2)
    assert execution.replay(OTHER).logits.tolist() == [3, 3]


def test_first_capture_failure_of_breakable_inside_a_break() -> None:
    world = World(backend=GraphBackend.BREAKABLE, prefill_sizes=None)
    attend, calls = world.context.attention.forward, []

    def breaks(*args: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:  # the recording after two warm-ups
            raise ValueError("in the break")
        return attend(*args)

    world.context.attention.forward = breaks
    world.capture()
    assert len(world.account.report().failed) == 1 and "in the break" in world.account.report().failed[0][2]


def test_backends_by_name() -> None:
    cpu = torch.device("cpu")
    for name in BACKENDS:
        assert create_execution_backend(name, cpu).name == name.value
    for name in (GraphBackend.AUTO, GraphBackend.OFF):
        with pytest.raises(ConfigError, match=name.value):
            create_execution_backend(name, cpu)
