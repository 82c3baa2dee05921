"""The compiled backend: right, never compiled twice, found on disk, and a broken file is no trouble."""

from pathlib import Path

import pytest
import torch
from fakes.world import World, solo_tokens

from graphrunner.config.engine_config import GraphBackend
from graphrunner.core.errors import CaptureError
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardVariant, ShapeKey
from graphrunner.execution.inductor import InductorBackend

KEY = ShapeKey(1, 1, ForwardVariant.LOGITS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def make_world(folder: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("GRAPHRUNNER_CACHE", str(folder))
    return World(backend=GraphBackend.INDUCTOR, decode_sizes=[2], prefill_sizes=[8]).capture()


def counts(world: World) -> tuple[int, int]:
    caches = [backend.cache for backend in world.backends]
    return sum(c.num_compiled for c in caches), sum(c.num_from_cache for c in caches)


def test_same_tokens_no_recompilation_and_a_second_start_compiles_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(folder, monkeypatch)
    assert counts(world) == (4, 0)
    for length in (3, 5, 8, 4) * 2:
        lives = [world.new(length), world.new(4)]
        for live in lives:
            world.step(chunks=[(live, len(live.tokens))], poison=7)
        for _ in range(3):
            world.step(decode=lives)
            assert world.last.miss is None
        for live, prompt_len in zip(lives, (length, 4), strict=True):
            assert live.tokens[prompt_len:] == solo_tokens(live.tokens[:prompt_len], 4)
            world.free(live)
    assert counts(world) == (4, 0)
    second = make_world(folder, monkeypatch)
    assert counts(second) == (0, 4)
    assert all(entry.stats.is_cached for entry in second.account.report().keys)
    lives = [second.new(5)]
    second.step(chunks=[(lives[0], 5)])
    second.step(decode=lives)
    assert lives[0].tokens[5:] == solo_tokens(lives[0].tokens[:5], 2)


def tiny(backend: InductorBackend, state: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    with torch.inference_mode(), backend.capture_session():
        backend.capture_one(KEY, lambda: ModelOutput(logits=state * factor + 1))
    state.fill_(3)
    with torch.inference_mode():
        return backend.replay(KEY).logits


def test_a_damaged_artefact_is_compiled_again(tmp_path: Path) -> None:
    backend = InductorBackend(tmp_path)
    assert tiny(backend, torch.zeros(4)).tolist() == [7.0] * 4
    (path,) = tmp_path.glob("*.bin")
    path.write_bytes(path.read_bytes()[:100])
    backend = InductorBackend(tmp_path)
    assert tiny(backend, torch.zeros(4)).tolist() == [7.0] * 4
    assert (backend.cache.num_compiled, backend.cache.num_from_cache) == (1, 0)
    backend = InductorBackend(tmp_path)
    tiny(backend, torch.zeros(4))
    assert (backend.cache.num_compiled, backend.cache.num_from_cache) == (0, 1)


def test_other_code_or_shape_is_another_artefact(tmp_path: Path) -> None:
    for state, factor in ((torch.zeros(4), 2.0), (torch.zeros(4), 3.0), (torch.zeros(5), 2.0)):
        backend = InductorBackend(tmp_path)
        assert tiny(backend, state, factor).tolist() == [3 * factor + 1] * len(state)
        assert backend.cache.num_compiled == 1
    assert len(list(tmp_path.glob("*"))) == 3


def test_a_folder_that_cannot_be_written_costs_only_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert tiny(InductorBackend(tmp_path / "file" / "folder"), torch.zeros(2)).tolist() == [7.0] * 2


def test_what_the_trace_did_not_see_is_noticed(tmp_path: Path) -> None:
    state, calls = torch.zeros(4), []

    def forward() -> ModelOutput:
        calls.append(1)
        return ModelOutput(logits=state + len(calls))

    with InductorBackend(tmp_path).capture_session(), pytest.raises(CaptureError, match="does not give"):
        InductorBackend(tmp_path).capture_one(KEY, forward)
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        InductorBackend(tmp_path).capture_one(KEY, lambda: ModelOutput(logits=state + state.sum().item()))
