"""A configuration is completed by transformers once; later starts read it from disk, or make it anew."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import transformers

from graphrunner.config.cache_file import digest
from graphrunner.config.env import cache_dir
from graphrunner.config.model_config import ModelConfig
from graphrunner.core.errors import ModelLoadError
from graphrunner.weights import config_cache
from graphrunner.weights.config_cache import ConfigCache
from graphrunner.weights.hf_config import model_config_from_folder

RAW = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "eos_token_id": [2, 5], "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a model."""
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", RAW)
    return tmp_path / "model"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where configurations are kept."""
    monkeypatch.setenv("GRAPHRUNNER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "configurations"


class Asked:
    """Stands in the way of transformers and counts who passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls = 0
        self._real = transformers.AutoConfig.from_pretrained
        monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", self)

    def __call__(self, name: str, **options: object) -> transformers.PreTrainedConfig:
        self.num_calls += 1
        return self._real(name, **options)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def write(folder: Path, raw: dict[str, object]) -> None:
    (folder / "config.json").write_text(json.dumps(raw))


def read_twice(folder: Path) -> tuple[ModelConfig, ModelConfig]:
    return model_config_from_folder(folder), model_config_from_folder(folder)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_scaling": None},
        {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "rope_scaling": None, "sliding_window": 8},
        {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "rope_scaling": None},
        {"architectures": ["OlmoForCausalLM"], "model_type": "olmo", "rope_scaling": None},
    ],
    ids=lambda more: more.get("model_type", "llama"),
)
def test_the_second_start_reads_the_same(folder: Path, kept: Path, asked: Asked, more: dict[str, object]) -> None:
    write(folder, RAW | more)
    first, second = read_twice(folder)
    assert asked.num_calls == 1 and len(list(kept.iterdir())) == 1
    assert first == second and first.hf_config == second.hf_config
    assert str(folder) not in next(kept.iterdir()).read_text()  # another folder may hold the same


def test_each_text_and_each_release_has_its_own(
    folder: Path, kept: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_twice(folder)
    write(folder, dict(reversed(RAW.items())))  # the same, in another order
    read_twice(folder)
    assert asked.num_calls == 1
    write(folder, RAW | {"vocab_size": 97})
    assert [config.vocab_size for config in read_twice(folder)] == [97, 97] and asked.num_calls == 2
    monkeypatch.setattr(metadata, "version", lambda name: "99.0.0")
    read_twice(folder)
    assert asked.num_calls == 3
    monkeypatch.setattr(config_cache, "_FORMAT", "of another time")
    read_twice(folder)
    assert asked.num_calls == 4 and len(list(kept.iterdir())) == 4


def test_what_is_added_to_a_configuration_is_not_kept_with_it(folder: Path, kept: Path, asked: Asked) -> None:
    assert model_config_from_folder(folder).eos_token_ids == (2, 5)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert model_config_from_folder(folder).eos_token_ids == (2, 5, 9)
    (folder / "generation_config.json").unlink()
    assert model_config_from_folder(folder).eos_token_ids == (2, 5) and asked.num_calls == 1


@pytest.mark.parametrize("damage", ["empty", "short", "altered", "foreign", "not text", "a list"])
def test_a_damaged_file_is_made_again(folder: Path, kept: Path, asked: Asked, damage: str) -> None:
    whole = model_config_from_folder(folder)
    (path,) = kept.iterdir()
    data = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "short": data[: len(data) // 2],
            "altered": data.replace(b'"vocab_size": 96', b'"vocab_size": 95'),
            "foreign": b'{"vocab_size": 95}',
            "not text": b"\xff" * 100,
            "a list": f"{digest('[]')}\n[]".encode(),
        }[damage]
    )
    assert read_twice(folder) == (whole, whole)
    assert asked.num_calls == 2 and path.read_bytes() == data


@pytest.mark.parametrize(
    "more",
    [
        {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}},
        {"draft": [{"auto_map": {}}]},
        {"configuration_files": ["config.json", "config.4.0.0.json"]},
    ],
    ids=["code of its own", "inside", "other files"],
)
def test_what_depends_on_more_than_its_text_is_not_kept(
    folder: Path, kept: Path, asked: Asked, more: dict[str, object]
) -> None:
    write(folder, RAW | more)
    (folder / "config.4.0.0.json").write_text(json.dumps(RAW))
    read_twice(folder)
    assert asked.num_calls == 2 and not kept.exists()


def test_a_configuration_of_someone_elses_class_is_not_kept(
    folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(transformers.LlamaConfig):
        pass

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *args, **options: Mine(**RAW))
    assert model_config_from_folder(folder).vocab_size == 96
    assert not kept.exists()


@pytest.mark.parametrize("version", ["5.30.0.dev0", None])
def test_an_unnamed_release_keeps_nothing(
    folder: Path, kept: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    def told(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", told)
    read_twice(folder)
    assert asked.num_calls == 2 and not kept.exists()


def test_a_failure_is_not_kept(folder: Path, kept: Path) -> None:
    write(folder, RAW | {"model_type": "mystery"})
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="unknown architecture"):
            model_config_from_folder(folder)
    assert not kept.exists()


def test_no_trouble_with_the_disk_is_the_starts(
    folder: Path, kept: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.parent.write_text("a file where the folder should be")
    read_twice(folder)
    kept.parent.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        read_twice(folder)
    assert asked.num_calls == 4 and not list(kept.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(config_cache, "cache_dir", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
        read_twice(folder)
    assert asked.num_calls == 6
    read_twice(folder)
    (path,) = kept.iterdir()
    path.unlink()
    path.mkdir()  # nothing can be read from it, nor moved onto it
    read_twice(folder)
    assert asked.num_calls == 9 and list(kept.iterdir()) == [path]


def test_a_cache_of_a_folder_of_its_own(tmp_path: Path) -> None:
    cache = ConfigCache(tmp_path / "a" / "b")
    assert cache.get(RAW) is None
    cache.put(RAW, {"x": [1, None]})
    assert cache.get(RAW) == {"x": [1, None]} and cache.get(RAW | {"model_type": None}) is None


START = """
import sys
from graphrunner import LLM
LLM(
    sys.argv[1], device="cpu", load_format="dummy", skip_tokenizer_init=True, max_num_seqs=2, max_model_len=32,
    max_num_batched_tokens=32, cpu_kv_cache_mib=16, num_threads=1,
).generate({"prompt_token_ids": [1, 2, 3]}, use_tqdm=False)
print(sorted(set(sys.modules) & {"transformers", "tokenizers", "huggingface_hub", "torch._dynamo", "sympy"}))
"""


def test_a_later_start_imports_no_transformers_and_no_compiler(folder: Path, tmp_path: Path) -> None:
    write(folder, RAW | {"hidden_size": 64})
    built = cache_dir() / "cpu_kernels"  # they need not be compiled again
    built.mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "cpu_kernels").symlink_to(built)
    environment = os.environ | {"GRAPHRUNNER_CACHE": str(tmp_path / "cache")}
    said = [
        subprocess.run(
            [sys.executable, "-c", START, str(folder)], env=environment, capture_output=True, text=True, check=True,
            timeout=240,
        ).stdout
        for _ in range(2)
    ]  # fmt: skip
    assert "transformers" in said[0] and said[1].strip() == "[]"
