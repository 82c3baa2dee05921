"""`quantization_config` of a checkpoint's config.json: in which numbers its projections are stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from graphrunner.config.quantization import Quantization
from graphrunner.core.errors import ModelLoadError

_COMPRESSED_FORMATS = {
    ("float-quantized", "float", 8): Quantization.FP8,
    ("naive-quantized", "float", 8): Quantization.FP8,
    ("int-quantized", "int", 8): Quantization.INT8,
    ("naive-quantized", "int", 8): Quantization.INT8,
    ("pack-quantized", "int", 4): Quantization.INT4,
}


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """How a checkpoint stores the weights of its projections.

    Attributes:
        method: `quant_method`, as the checkpoint calls it.
        packing: of the projections that are packed.
        block: output rows and inputs that share an fp8 scale; None for a scale per matrix or row.
        group_size: inputs that share an int4 scale; 0 is all.
        zero_offset: what a stored int4 zero lacks (GPTQ's first format keeps it less one).
        ignored: modules left alone: whole names, leading or trailing parts of names, or "re:" and an expression.
    """

    method: str
    packing: Quantization
    block: tuple[int, int] | None = None
    group_size: int = 0
    zero_offset: int = 0
    ignored: tuple[str, ...] = ()

    def is_ignored(self, module: str) -> bool:
        """Whether the config says that a module, such as "model.layers.0.mlp.up_proj", is stored as plain numbers."""
        for pattern in self.ignored:
            if pattern.startswith("re:"):
                if re.match(pattern[3:], module):
                    return True
            elif module == pattern or module.startswith(pattern + ".") or module.endswith("." + pattern):
                return True
        return False

    def agrees_with(self, asked: Quantization) -> bool:
        """Whether a user's own setting names what the checkpoint is; "fp8" names either kind of fp8."""
        is_fp8 = self.packing in (Quantization.FP8, Quantization.FP8_BLOCK)
        return asked in (Quantization.NONE, self.packing) or (asked is Quantization.FP8 and is_fp8)


def checkpoint_quantization(hf: Mapping[str, object]) -> CheckpointQuantization | None:
    """Read the section; None when there is none.

    Raises:
        ModelLoadError: a method, number format or field value that no reader here knows, by name and value.
    """
    section = hf.get("quantization_config") or hf.get("compression_config")
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise ModelLoadError(f"model config: quantization_config={section!r} must be an object")
    method = str(section.get("quant_method"))
    if method == "fp8":
        return _fp8(section)
    if method == "fbgemm_fp8":
        return CheckpointQuantization(method, Quantization.FP8, ignored=_names(section, "modules_to_not_convert"))
    if method == "compressed-tensors":
        return _compressed(section)
    if method in ("gptq", "awq"):
        return _int4_by_columns(method, section)
    raise ModelLoadError(
        f"quantization_config.quant_method={method!r} is not supported: use fp8, fbgemm_fp8, compressed-tensors, gptq, "
        "awq, an unquantized checkpoint or a GGUF file"
    )


def _fp8(section: Mapping[str, object]) -> CheckpointQuantization:
    fmt = section.get("fmt", "e4m3")
    if fmt not in ("e4m3", None):
        raise _bad("fmt", fmt, "must be e4m3")
    ignored = _names(section, "modules_to_not_convert") + _names(section, "ignored_layers")
    block = section.get("weight_block_size")
    if block is None:
        return CheckpointQuantization("fp8", Quantization.FP8, ignored=ignored)
    return CheckpointQuantization("fp8", Quantization.FP8_BLOCK, _block(block, "weight_block_size"), ignored=ignored)


def _int4_by_columns(method: str, section: Mapping[str, object]) -> CheckpointQuantization:
    """GPTQ and AWQ: both pack down the inputs, with a scale and a zero a group."""
    if section.get("bits") != 4:
        raise _bad("bits", section.get("bits"), "must be 4")
    group_size = section.get("group_size")
    if not isinstance(group_size, int) or (group_size != -1 and (group_size < 2 or group_size % 2)):
        raise _bad("group_size", group_size, "must be -1 or an even number above 0")
    form, known = ("checkpoint_format", ("gptq", "gptq_v2")) if method == "gptq" else ("version", ("gemm", "GEMM"))
    value = section.get(form, known[0])
    if value not in known:
        raise _bad(form, value, f"must be {known[0]}")
    ignored = _names(section, "modules_to_not_convert") + (() if section.get("lm_head") else ("lm_head",))
    zero_offset = 1 if value == "gptq" else 0
    return CheckpointQuantization(method, Quantization.INT4, None, max(group_size, 0), zero_offset, ignored)


def _compressed(section: Mapping[str, object]) -> CheckpointQuantization:
    groups = section.get("config_groups")
    schemes = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    if len(schemes) != 1 or not isinstance(schemes[0].get("weights"), Mapping):
        raise _bad("config_groups", f"{len(schemes)} groups", "must be one group that has weights")
    weights = schemes[0]["weights"]
    kind, num_bits = str(weights.get("type", "int")), weights.get("num_bits")
    fmt = str(section.get("format") or schemes[0].get("format"))
    packing = _COMPRESSED_FORMATS.get((fmt, kind, num_bits)) if isinstance(num_bits, int) else None
    if packing is None:
        raise _bad("format", fmt, f"is not supported with {num_bits}-bit {kind} weights")
    ignored = _names(section, "ignore")
    strategy = str(weights.get("strategy"))
    if strategy == "block" and packing is Quantization.FP8:
        block = _block(weights.get("block_structure"), "weights.block_structure")
        return CheckpointQuantization("compressed-tensors", Quantization.FP8_BLOCK, block, ignored=ignored)
    group_size = 0
    if strategy == "group" and packing is Quantization.INT4:
        group_size = weights.get("group_size")
        if not isinstance(group_size, int) or group_size < 2 or group_size % 2:
            raise _bad("weights.group_size", group_size, "must be an even number above 0")
    elif strategy not in ("tensor", "channel"):
        raise _bad("weights.strategy", strategy, f"is not supported with {num_bits}-bit {kind} weights")
    if weights.get("actorder") in ("group", True):
        raise _bad("weights.actorder", weights.get("actorder"), "is not supported")
    return CheckpointQuantization("compressed-tensors", packing, None, group_size, ignored=ignored)


def _block(value: object, name: str) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(i, int) and i > 0 for i in value):
        raise _bad(name, value, "must be two positive numbers")
    return int(value[0]), int(value[1])


def _names(section: Mapping[str, object], key: str) -> tuple[str, ...]:
    value = section.get(key) or ()
    if not isinstance(value, list | tuple):
        raise _bad(key, value, "must be a list of module names")
    return tuple(str(name) for name in value)


def _bad(name: str, value: object, rule: str) -> ModelLoadError:
    return ModelLoadError(f"model config: quantization_config.{name}={value!r} {rule}")
