"""Cut at attention, compiled piece by piece: right, alive to each step's batch, and found on disk."""

from pathlib import Path

import pytest
import torch
from fakes.world import World, solo_tokens

from graphrunner.config.engine_config import GraphBackend
from graphrunner.core.outputs import ModelOutput
from graphrunner.device.graph import eager_break
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


@pytest.mark.parametrize("count", [1, 2])
def test_piecewise_steps(count: int, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHRUNNER_CACHE", str(tmp_path))
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
