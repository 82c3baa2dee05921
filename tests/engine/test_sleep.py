"""Sleep gives the device back, wake restores it; a reload changes the weights under recorded graphs."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_driver import generate, greedy, pool_check, prompts_of
from fakes.fake_accelerator import MIB, FakeAccelerator, install
from safetensors.torch import load_file, save_file

from graphrunner import LLM
from graphrunner.core.errors import EngineStateError, InvalidRequestError, ModelLoadError
from graphrunner.weights.offload import ModelMemory

GRAPHS = {
    "device": "cpu", "decode_graph": "recording", "prefill_graph": "recording", "decode_sizes": [1, 2, 4],
    "prefill_sizes": [16, 64],
}  # fmt: skip
PROMPTS = prompts_of([5, 16, 33])
CONFIGS = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "lazy": {"capture": "lazy"},
    "int8": {"quantization": "int8"},
    "fallback": {"model_impl": "transformers"},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "checked": {"check_graphs": True},
    "dummy": {"load_format": "dummy"},
}

Make = Callable[..., LLM]


@pytest.fixture
def own_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "own"))


def open_own(folder: Path, **options: object) -> LLM:
    base = {"max_model_len": 128, "max_num_seqs": 8, "num_pages": 200, "skip_tokenizer_init": True, "num_threads": 1}
    return LLM(str(folder), **(base | GRAPHS | options))


def change_weights(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = {name: tensor.roll(1, 0).contiguous() for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def num_replays(llm: LLM) -> int:
    return sum(key.num_replays for key in llm.graph_report().keys)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_answers_after(make_llm: Make, name: str, level: int) -> None:
    llm = make_llm(**GRAPHS | CONFIGS[name])
    expected = generate(llm, PROMPTS, greedy(10))
    assert not llm.is_asleep
    llm.sleep(level)
    llm.sleep(level)
    assert llm.is_asleep
    pool_check(llm)
    llm.wake()
    llm.wake()
    assert not llm.is_asleep
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], greedy(10), use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert all(output.num_cached_tokens == 0 for output in outputs)
    assert generate(llm, PROMPTS, greedy(10)) == expected
    assert (num_replays(llm) > 0) == (name != "eager")
    pool_check(llm)


@pytest.mark.parametrize("level", [1, 2])
def test_everything_is_given_back(make_llm: Make, monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    card = install(monkeypatch, FakeAccelerator(2048 * MIB))
    llm = make_llm(**GRAPHS)
    model_runner = llm.engine.core.model_runner
    before = card.used_bytes()
    assert before > 0
    llm.sleep(level)
    assert card.used_bytes() == 0
    assert not any(runner.backend._forwards for runner in model_runner.graph_runners)
    llm.wake()
    assert card.used_bytes() == before
    assert all(runner.backend._forwards for runner in model_runner.graph_runners)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_a_card_go_and_come_back(
    make_llm: Make, monkeypatch: pytest.MonkeyPatch, name: str, level: int
) -> None:
    """Nothing of the model stays on a card, and a wake that fails half way loses nothing of what the host keeps."""
    card = install(monkeypatch, FakeAccelerator(2048 * MIB))
    llm = make_llm(**GRAPHS | CONFIGS[name])
    expected = generate(llm, PROMPTS, greedy(6))
    blocks = llm.engine.token_engine._residency._memory._blocks.values()
    for _ in range(2):
        llm.sleep(level)
        assert all(block.is_away for block in blocks)
        assert all((block.host is None) == (level == 2 and block.is_loaded) for block in blocks)
        card.set_limit(0)
        with pytest.raises(EngineStateError, match="the device has not the memory to wake up"):
            llm.wake()
        assert llm.is_asleep and all(block.is_away for block in blocks)
        card.set_limit(1 << 40)
        llm.wake()
        assert not any(block.is_away or block.host is not None for block in blocks)
        assert generate(llm, PROMPTS, greedy(6)) == expected


def test_an_error_that_is_not_about_memory_is_told_as_it_is(make_llm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(**GRAPHS)
    expected = generate(llm, PROMPTS, greedy(5))
    llm.sleep(2)
    residency = llm.engine.token_engine._residency
    for error, shown in (
        (RuntimeError("an odd kernel"), pytest.raises(RuntimeError, match="an odd kernel")),
        (KeyboardInterrupt(), pytest.raises(KeyboardInterrupt)),
        (torch.OutOfMemoryError("2 GiB\nallocator state"), pytest.raises(EngineStateError, match=r"free: 2 GiB$")),
    ):
        with monkeypatch.context() as patch, shown:
            patch.setattr(residency, "_reload", lambda error=error: (_ for _ in ()).throw(error))
            llm.wake()
        assert llm.is_asleep
    llm.wake()
    assert generate(llm, PROMPTS, greedy(5)) == expected


def test_a_dropped_weight_takes_no_memory(make_llm: Make) -> None:
    llm = make_llm(**GRAPHS)
    memory = llm.engine.token_engine._residency._memory
    loaded = [block for block in memory._blocks.values() if block.is_loaded]
    assert sum(block.num_bytes for block in loaded) > 0.8 * memory.num_bytes
    llm.sleep(2)
    assert not any(block.storage.nbytes() for block in loaded)


def test_requests_while_asleep_are_refused(make_llm: Make) -> None:
    llm = make_llm(**GRAPHS)
    llm.sleep()
    for ask in (
        lambda: generate(llm, PROMPTS, greedy(2)),
        lambda: next(llm.stream({"prompt_token_ids": PROMPTS[0]}, greedy(2))),
        lambda: llm.embed([{"prompt_token_ids": PROMPTS[0]}], use_tqdm=False),
        llm.reload_weights,
    ):
        with pytest.raises(EngineStateError, match=r"^the engine is asleep: wake it first$"):
            ask()
    assert not llm.engine.has_unfinished_requests()
    llm.wake()
    assert len(generate(llm, PROMPTS, greedy(2))) == 3


def test_sleep_waits_for_nobody(make_llm: Make) -> None:
    llm = make_llm(**GRAPHS, max_num_seqs=1)
    for index in range(2):
        llm.engine.add_request(f"r{index}", {"prompt_token_ids": PROMPTS[index]}, greedy(5))
    llm.engine.step()
    for what in (llm.sleep, llm.reload_weights):
        with pytest.raises(EngineStateError, match=r"while 1 requests run and 1 wait: let them finish, or abort them"):
            what()
    assert not llm.is_asleep
    for index in range(2):
        llm.engine.abort_request(f"r{index}")
    llm.sleep()
    llm.wake()
    pool_check(llm)


def test_there_are_two_levels(make_llm: Make) -> None:
    llm = make_llm(**GRAPHS)
    for level in (0, 3, -1):
        with pytest.raises(InvalidRequestError, match=f"level={level}: must be 1"):
            llm.sleep(level)
    assert not llm.is_asleep


def test_no_memory_to_wake_up_in(make_llm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    card = install(monkeypatch, FakeAccelerator(2048 * MIB))
    llm = make_llm(**GRAPHS, num_pages=5000, max_num_seqs=400)
    expected = generate(llm, PROMPTS, greedy(5))
    llm.sleep()
    card.set_limit(MIB)
    for _ in range(2):
        with pytest.raises(EngineStateError, match=r"the device has not the memory to wake up, \d+ MiB are free"):
            llm.wake()
        assert llm.is_asleep and card.page_bytes() == 0
    card.set_limit(1 << 40)
    llm.wake()
    assert generate(llm, PROMPTS, greedy(5)) == expected


def test_a_failed_restore_stays_asleep(make_llm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(**GRAPHS)
    expected = generate(llm, PROMPTS, greedy(5))
    llm.sleep(2)
    with monkeypatch.context() as patch:
        patch.setattr(ModelMemory, "restore", lambda self: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(EngineStateError, match="no room"):
            llm.wake()
    assert llm.is_asleep
    llm.wake()
    assert generate(llm, PROMPTS, greedy(5)) == expected


@pytest.mark.parametrize("name", ["plain", "int8", "fallback", "ngram"])
def test_a_reload_is_seen_by_recorded_graphs(own_folder: Path, name: str) -> None:
    with open_own(own_folder, **CONFIGS[name]) as llm:
        model = llm.engine.token_engine._residency._memory
        addresses = [block.storage.data_ptr() for block in model._blocks.values()]
        before = generate(llm, PROMPTS, greedy(8))
        change_weights(own_folder)
        assert generate(llm, PROMPTS, greedy(8)) == before
        llm.reload_weights()
        after = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], greedy(8), use_tqdm=False)
        assert all(output.num_cached_tokens == 0 for output in after)
        assert addresses == [block.storage.data_ptr() for block in model._blocks.values()]
        replayed = num_replays(llm)
    with open_own(own_folder, enforce_eager=True, **CONFIGS[name]) as fresh:
        expected = generate(fresh, PROMPTS, greedy(8))
    assert [list(output.outputs[0].token_ids) for output in after] == expected != before
    assert replayed > 0


def test_a_reload_that_fails_stops_requests_until_one_succeeds(own_folder: Path) -> None:
    with open_own(own_folder) as llm:
        expected = generate(llm, PROMPTS, greedy(5))
        (file,) = own_folder.glob("*.safetensors")
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ModelLoadError):
            llm.reload_weights()
        with pytest.raises(EngineStateError, match=r"the weights are not whole .*: reload them first"):
            generate(llm, PROMPTS, greedy(5))
        file.write_bytes(whole)
        llm.reload_weights()
        assert generate(llm, PROMPTS, greedy(5)) == expected


def test_a_reload_cut_off_in_the_middle_leaves_nothing_to_run(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_own(own_folder) as llm:
        expected = generate(llm, PROMPTS, greedy(5))
        residency = llm.engine.token_engine._residency
        for error in (KeyboardInterrupt(), RuntimeError("an odd kernel")):
            with monkeypatch.context() as patch:
                patch.setattr(residency, "_reload", lambda error=error: (_ for _ in ()).throw(error))
                with pytest.raises(type(error)):
                    llm.reload_weights()
            with pytest.raises(EngineStateError, match=r"not whole \((KeyboardInterrupt|an odd kernel)\)"):
                generate(llm, PROMPTS, greedy(5))
        llm.reload_weights()
        assert generate(llm, PROMPTS, greedy(5)) == expected


def test_a_folder_that_is_gone_is_named(own_folder: Path) -> None:
    with open_own(own_folder) as llm:
        own_folder.rename(own_folder.with_name("elsewhere"))
        with pytest.raises(ModelLoadError, match=r"model\.safetensors: cannot be read: No such file or directory$"):
            llm.reload_weights()


def test_dropped_weights_that_cannot_be_read_leave_it_asleep(own_folder: Path) -> None:
    with open_own(own_folder) as llm:
        expected = generate(llm, PROMPTS, greedy(5))
        (file,) = own_folder.glob("*.safetensors")
        hidden = file.rename(file.with_suffix(".hidden"))
        llm.sleep(2)
        with pytest.raises(ModelLoadError):
            llm.wake()
        assert llm.is_asleep
        hidden.rename(file)
        llm.wake()
        assert generate(llm, PROMPTS, greedy(5)) == expected


def test_sleep_counts_no_step(make_llm: Make) -> None:
    llm = make_llm(**GRAPHS)
    generate(llm, PROMPTS, greedy(4))
    count = len(llm.steps)
    llm.sleep()
    llm.wake()
    assert len(llm.steps) == count
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("options", [{}, {"speculative": "ngram"}], ids=["overlapped", "told beside"])
def test_steps_of_those_who_left_keep_nobody_awake(make_llm, solo, monkeypatch, options: dict[str, object]) -> None:
    def interrupted(batch: object) -> None:
        raise KeyboardInterrupt

    llm = make_llm(overlap=True, **options)
    (prompt,) = prompts_of([9])
    for rest in (lambda: (llm.sleep(), llm.wake()), llm.reload_weights):
        stream = llm.stream({"prompt_token_ids": prompt}, greedy(30))
        next(stream)
        with pytest.raises(EngineStateError, match="1 requests run"):
            rest()
        stream.close()
        rest()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(llm.engine.core.model_runner, "forward", interrupted)
            generate(llm, [prompt], greedy(8))
        rest()
        assert generate(llm, [prompt], greedy(8)) == [solo(prompt, 8)]
        pool_check(llm)
