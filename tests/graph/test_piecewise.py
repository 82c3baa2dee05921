"""Cut at attention, compiled piece by piece: right, alive to each step's batch, and found on disk."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes.world import World, solo_tokens

from graphrunner.config.engine_config import GraphBackend
from graphrunner.core.active_batch import active_batch
from graphrunner.core.errors import CaptureError
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardVariant, ShapeKey
from graphrunner.device.cpu import CpuDevice
from graphrunner.device.graph import eager_break
from graphrunner.execution import registry
from graphrunner.execution.artifact_cache import ArtifactCache
from graphrunner.execution.compiled_steps import CompiledBreak, RecordedPiece
from graphrunner.execution.registry import create_execution_backend
from graphrunner.execution.split import Break, Piece, split_forward


def test_a_forward_is_cut_at_its_breaks() -> None:
    state, weights = torch.ones(2), [torch.full((2,), float(i)) for i in (2, 3)]

    def forward() -> ModelOutput:
        hidden = state + 1
        for weight in weights:
            hidden = eager_break(lambda batch, x: x * batch, 10, hidden * weight) + hidden
        return ModelOutput(logits=hidden)

    split = split_forward(forward)
    assert [type(step) for step in split.steps] == [Piece, Break, Piece, Break, Piece]
    assert [step.call(2, torch.ones(1)).item() for step in split.steps if isinstance(step, Break)] == [2, 2]
    first, *_, last = (step for step in split.steps if isinstance(step, Piece))
    assert len(first.outputs) == 2 and len(first.inputs) == 2 and last.outputs == split.results
    assert "value_0" in first.module.code
    assert torch.equal(eager_break(lambda batch, x: x * batch, 10, torch.ones(1)), torch.full((1,), 10.0))


@pytest.fixture(autouse=True)
def own_artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of each test's own for what it compiles."""
    monkeypatch.setenv("GRAPHRUNNER_CACHE", str(tmp_path))


def test_what_is_not_in_the_trace_is_refused() -> None:
    """Python that does something else at each call; a value that is read back."""
    state, counter = torch.ones(2, 4), itertools.count(1)
    backend = create_execution_backend(GraphBackend.PIECEWISE, torch.device("cpu"))
    key = ShapeKey(2, 2, ForwardVariant.LOGITS)
    with backend.capture_session(), torch.inference_mode():
        with pytest.raises(CaptureError, match="does not give the logits"):
            backend.capture_one(key, lambda: ModelOutput(logits=state * next(counter)))
        with pytest.raises(CaptureError, match="2t x 2r"):
            backend.capture_one(key, lambda: ModelOutput(logits=state * float(state.sum())))
        assert not backend.can_run(key)
        backend.capture_one(key, lambda: ModelOutput(logits=state * 3))
    assert backend.can_run(key)


def test_attention_results_share_a_place_only_while_nobody_else_reads_them() -> None:
    """The first break's result is read again after the second."""
    state = torch.arange(8.0).view(2, 4)
    batch = SimpleNamespace(positions=state)

    def forward() -> ModelOutput:
        first = eager_break(lambda batch, x: x * 10, batch, state + 1)
        second = eager_break(lambda batch, x: x * 100, batch, first + 1)
        third = eager_break(lambda batch, x: x * 1000, batch, second + 1)
        return ModelOutput(logits=first.view(4, 2).view(2, 4) + third.view(2, 4))

    backend = create_execution_backend(GraphBackend.PIECEWISE, torch.device("cpu"))
    key = ShapeKey(2, 2, ForwardVariant.LOGITS)
    with backend.capture_session(), torch.inference_mode():
        backend.capture_one(key, forward)
        for factor in (1.0, -3.0):
            state.mul_(factor)
            with active_batch(batch):
                assert torch.equal(backend.replay(key).logits, forward().logits)
    outputs = [step.output.data_ptr() for step in backend._recordings[key].steps if isinstance(step, CompiledBreak)]
    assert len(set(outputs)) == 2, "the second and the third share, the first is its own"


class TapeDevice(CpuDevice):
    """A CPU whose pieces are recorded like a GPU's, on tapes."""

    has_own_memory = True


def test_recorded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device with graphs does with compiled pieces. A tape sees only operators, so they are left uncompiled."""
    monkeypatch.setattr(ArtifactCache, "get", lambda cache, traced: (traced.module, True))
    monkeypatch.setattr(registry, "device_of", lambda device: TapeDevice())
    world = World(backend=GraphBackend.PIECEWISE).capture()
    assert not world.account.report().failed
    steps = [step for each in world.backends[0]._recordings.values() for step in each.steps]
    assert {type(step) for step in steps} == {RecordedPiece, CompiledBreak}
    lives = [world.new(length) for length in (3, 9, 5)]
    world.step(chunks=[(lives[0], 3), (lives[1], 4)], poison=7)
    world.step(decode=lives[:1], chunks=[(lives[1], 5), (lives[2], 5)], poison=7)
    for count in (3, 1, 2, 3):
        world.step(decode=lives[:count], poison=7)
        assert world.last.miss is None
    for live, length in zip(lives, (3, 9, 5), strict=True):
        assert live.tokens[length:] == solo_tokens(live.tokens[:length], len(live.tokens) - length)
    for backend in world.backends:
        backend.close()
        backend.close()


@pytest.mark.parametrize("count", [1, 2])
def test_piecewise_steps(count: int, device: torch.device) -> None:
    world = World(device, backend=GraphBackend.PIECEWISE, decode_sizes=[2], prefill_sizes=[8]).capture()
    assert not world.account.report().failed
    lengths = [3, 4][:count]
    lives = [world.new(length) for length in lengths]
    world.step(chunks=[(live, len(live.tokens)) for live in lives], poison=7)
    for _ in range(3):
        world.step(decode=lives, poison=7)
        assert world.last.miss is None
    for live, length in zip(lives, lengths, strict=True):
        assert live.tokens[length:] == solo_tokens(live.tokens[:length], 4, device)
    again = World(device, backend=GraphBackend.PIECEWISE, decode_sizes=[2], prefill_sizes=[8]).capture()
    assert sum(backend.cache.num_compiled for backend in again.backends) == 0
    for backend in again.backends:
        backend.close()
        backend.close()
