"""config.json of a model folder, with transformers' defaults filled in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from graphrunner.config.checkpoint_quantization import checkpoint_quantization
from graphrunner.config.hf_model_config import architecture_of, model_config_from_hf
from graphrunner.config.model_config import NATIVE_ARCHITECTURES, ModelConfig
from graphrunner.core.errors import ModelLoadError
from graphrunner.weights.config_cache import ConfigCache


def model_config_from_folder(folder: Path) -> ModelConfig:
    """Read a Hugging Face model folder's configuration.

    End-of-sequence ids of generation_config.json are added to those of config.json: chat models list the token that
    ends a turn only there.

    Raises:
        ModelLoadError: no or invalid config.json, an unknown architecture, a quantization we cannot read.
    """
    raw = _read_json(folder / "config.json")
    architecture = architecture_of(raw)
    packed = checkpoint_quantization(raw)
    if packed is not None and architecture not in NATIVE_ARCHITECTURES and "text_config" not in raw:
        method = f"quantization_config.quant_method={packed.method!r}"
        raise ModelLoadError(f"{folder}: {method} of {architecture}, which has no native model, is not supported")
    hf = _with_defaults(folder, raw)
    if "text_config" not in raw:
        hf["architectures"] = [architecture]
    if architecture not in NATIVE_ARCHITECTURES and "text_config" not in raw:
        _require_causal_lm(folder, architecture, str(hf.get("model_type")))
    generation_path = folder / "generation_config.json"
    if generation_path.is_file():
        hf["eos_token_id"] = _merged_ids(hf.get("eos_token_id"), _read_json(generation_path).get("eos_token_id"))
    return replace(model_config_from_hf(hf), checkpoint_quantization=packed)


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent}: has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value


def _with_defaults(folder: Path, raw: dict[str, object]) -> dict[str, object]:
    """`raw` as transformers completes it, from the cache where it is there. See Note [a cached configuration]."""
    cache = ConfigCache()
    kept = cache.get(raw)
    if kept is not None:
        return kept
    from transformers import AutoConfig

    try:
        made = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        # Through JSON, so that this start reads what the next one will: lists for tuples, text for keys.
        hf = dict(json.loads(json.dumps(made.to_dict(), default=str)))
    except Exception as error:  # transformers raises many kinds here; each means that this folder cannot be used
        first_line = str(error).strip().partition("\n")[0]
        name = raw.get("architectures") or raw.get("model_type")
        raise ModelLoadError(f"{folder}: unknown architecture or bad config ({name!r}): {first_line}") from error
    hf.pop("_name_or_path", None)  # the same text in another folder is the same configuration
    if type(made).__module__.startswith("transformers."):
        cache.put(raw, hf)
    return hf


def _require_causal_lm(folder: Path, architecture: str, model_type: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelLoadError(f"{folder}: {architecture} (model_type={model_type!r}) is not a causal language model")


def _merged_ids(*values: object) -> list[int]:
    merged: list[int] = []
    for value in values:
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, int) and one not in merged:
                merged.append(one)
    return merged
