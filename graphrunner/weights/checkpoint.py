"""Reading a checkpoint: one lazy stream of (Hugging Face name, weight), whatever the file format."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from graphrunner.config.checkpoint_quantization import CheckpointQuantization
from graphrunner.config.model_config import ModelConfig
from graphrunner.config.quantization import Quantization
from graphrunner.core.errors import ModelLoadError
from graphrunner.kernels.packed_weight import Weight
from graphrunner.weights.dummy import iterate_dummy
from graphrunner.weights.gguf_names import HFTensor, to_hf
from graphrunner.weights.gguf_quants import dequantize
from graphrunner.weights.gguf_reader import GGUFFile, GGUFTensor
from graphrunner.weights.memory import check_fits
from graphrunner.weights.packed_modules import PackedModule, assemble, shape_of, split_packed
from graphrunner.weights.progress import OnProgress
from graphrunner.weights.quantize import quantize, quantize_int4
from graphrunner.weights.safetensors_reader import iterate_entries, read_entries
from graphrunner.weights.shapes import expected_shapes
from graphrunner.weights.source import ModelSource, SourceKind

# The text half of a vision checkpoint: longest first, so that the more specific one wins.
_TEXT_PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", ""))


_CACHE_SCALES = (".self_attn.k_scale", ".self_attn.v_scale")  # of an fp8 cache; a packed checkpoint may have them


class Rounding(StrEnum):
    """What happens to weights between the file and the compute dtype.

    AUTO rounds the embedded model to bf16, the precision it was trained in and its golden outputs are stated for,
    and leaves every other checkpoint alone.
    """

    AUTO = "auto"
    NONE = "none"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class _Pending:
    """One weight that will be read: its final name and shape, and what it takes in the file and on the device."""

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True)
class _Target:
    """Where weights go and what they become."""

    dtype: torch.dtype
    device: torch.device
    round_to: torch.dtype | None
    quantization: Quantization
    has_room: bool = False

    def pending(self, name: str, shape: tuple[int, ...], num_bytes: int) -> _Pending:
        """A plain weight; projections among them count as they will be packed."""
        is_head = name == "lm_head.weight"
        packing = self.quantization.of_head if is_head else self.quantization
        size = packing.bytes_per_weight if is_head or name.endswith("_proj.weight") else None
        return _Pending(name, shape, num_bytes, int(math.prod(shape) * (size or self.dtype.itemsize)))

    def pending_packed(self, module: PackedModule, checkpoint: CheckpointQuantization) -> _Pending:
        """A packed weight; a CPU keeps 4 bits as 8, and fp8 widened."""
        shape = shape_of(module, checkpoint)
        num_bytes = sum(entry.num_bytes for entry in module.entries.values())
        is_fp8 = checkpoint.packing in (Quantization.FP8, Quantization.FP8_BLOCK)
        on_cpu = math.prod(shape) * (self.dtype.itemsize if is_fp8 else 1)
        device_bytes = on_cpu if self.device.type == "cpu" else num_bytes
        return _Pending(f"{module.name}.weight", shape, num_bytes, device_bytes)

    def plain(self, weight: Tensor) -> Tensor:
        """Floats in the dtype wanted, integers as they are."""
        return self.convert(weight) if weight.is_floating_point() else weight.to(self.device)

    def convert(self, weight: Tensor) -> Tensor:
        if self.round_to is not None:
            weight = weight.to(self.round_to)
        return weight.to(device=self.device, dtype=self.dtype)


def iterate_weights(
    source: ModelSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    rounding: Rounding = Rounding.AUTO,
    quantization: Quantization = Quantization.NONE,
    seed: int = 0,
    on_progress: OnProgress | None = None,
    has_room: bool = False,
) -> Iterator[tuple[str, Tensor | Weight]]:
    """Yield every weight once, in the file's order.

    Args:
        source: from resolve_source.
        config: from load_model_config; native architectures are checked against it before anything is read.
        dtype: of the yielded weights; integer tensors keep theirs.
        device: where they are put. GGUF blocks are decoded there.
        quantization: what plain projections will be packed into, for the memory check.
        seed: of dummy weights.
        on_progress: see progress.OnProgress.
        has_room: the memory for all of it is there already, so that free memory is not asked for.

    Returns:
        (name, float [shape of the checkpoint]), packed where the checkpoint has it packed; tied heads and unused
        buffers are left out. Aliasing: a CPU weight may be a view of the mapped file; copy what you change.

    Raises:
        ModelLoadError: does not fit in memory, a tensor is missing, misshapen, unknown or unreadable.
    """
    target = _Target(dtype, torch.device(device), _round_to(source, rounding), quantization, has_room)
    if source.kind is SourceKind.DUMMY:
        return _iterate_dummy(source, config, target, seed, on_progress)
    if source.kind is SourceKind.GGUF:
        return _iterate_gguf(source, config, target, on_progress)
    if source.kind is SourceKind.SAFETENSORS:
        return _iterate_safetensors(source, config, target, on_progress)
    return _iterate_pickle(source, config, target, on_progress)


def _round_to(source: ModelSource, rounding: Rounding) -> torch.dtype | None:
    is_rounded = rounding is Rounding.BF16 or (rounding is Rounding.AUTO and source.is_embedded)
    return torch.bfloat16 if is_rounded else None


def _iterate_dummy(
    source: ModelSource, config: ModelConfig, target: _Target, seed: int, on_progress: OnProgress | None
) -> Iterator[tuple[str, Tensor | Weight]]:
    if not config.is_native:
        raise ModelLoadError(f"{source.name}: dummy weights of {config.architecture} are filled by its own model")
    shapes = expected_shapes(config)
    pending = [target.pending(name, shape, math.prod(shape) * target.dtype.itemsize) for name, shape in shapes.items()]
    progress = _begin(source, config, target, pending, on_progress)
    for (name, weight), one in zip(iterate_dummy(config, target.dtype, target.device, seed), pending, strict=True):
        yield name, _as_stored(name, weight, config.checkpoint_quantization)
        progress.add(one)


def _as_stored(name: str, weight: Tensor, checkpoint: CheckpointQuantization | None) -> Tensor | Weight:
    """A random weight in the numbers that a checkpoint of this config would have."""
    is_projection = name.endswith("_proj.weight") or name == "lm_head.weight"
    if checkpoint is None or not is_projection or checkpoint.is_ignored(name.removesuffix(".weight")):
        return weight
    if checkpoint.packing is Quantization.INT4 and checkpoint.group_size:
        return quantize_int4(weight, checkpoint.group_size)
    return quantize(weight, checkpoint.packing)


def _iterate_gguf(
    source: ModelSource, config: ModelConfig, target: _Target, on_progress: OnProgress | None
) -> Iterator[tuple[str, Tensor]]:
    file = GGUFFile(source.path)
    architecture = str(file.metadata["general.architecture"])
    wanted: list[tuple[GGUFTensor, HFTensor, _Pending]] = []
    for tensor in file.tensors.values():
        hf_tensor = to_hf(tensor.name, architecture, config.num_q_heads, config.num_kv_heads)
        if hf_tensor is not None:
            wanted.append((tensor, hf_tensor, target.pending(hf_tensor.name, tensor.shape, tensor.num_bytes)))
    progress = _begin(source, config, target, [one for _, _, one in wanted], on_progress)
    for tensor, hf_tensor, one in wanted:
        # A norm stored as w + 1 must lose the one before it is rounded, not after.
        is_rounded_later = hf_tensor.is_norm_plus_one
        decoded = torch.empty(
            tensor.shape, dtype=torch.float32 if is_rounded_later else target.dtype, device=target.device
        )
        dequantize(file.raw(tensor), tensor.kind, decoded, None if is_rounded_later else target.round_to)
        yield hf_tensor.name, target.convert(hf_tensor.restore(decoded))
        progress.add(one)


def _iterate_safetensors(
    source: ModelSource, config: ModelConfig, target: _Target, on_progress: OnProgress | None
) -> Iterator[tuple[str, Tensor | Weight]]:
    named = {_final_name(entry.name, config): entry for entry in read_entries(source.weight_files)}
    plain = {name: entry for name, entry in named.items() if name is not None}
    modules: dict[str, PackedModule] = {}
    checkpoint = config.checkpoint_quantization
    if checkpoint is not None:
        plain, modules = split_packed(plain, checkpoint)
    pending = {name: target.pending(name, entry.shape, entry.num_bytes) for name, entry in plain.items()}
    if checkpoint is not None:
        pending |= {name: target.pending_packed(module, checkpoint) for name, module in modules.items()}
    progress = _begin(source, config, target, list(pending.values()), on_progress)
    weight_of = {entry.name: name for name, entry in plain.items()}
    weight_of |= {entry.name: name for name, module in modules.items() for entry in module.entries.values()}
    wanted = [entry for entry in named.values() if entry.name in weight_of]
    arrived: dict[str, dict[str, Tensor]] = {}
    for entry, tensor in iterate_entries(wanted):
        name = weight_of[entry.name]
        if name not in modules or checkpoint is None:
            yield name, target.plain(tensor.reshape(()) if name.endswith(_CACHE_SCALES) else tensor)
            progress.add(pending[name])
            continue
        parts = arrived.setdefault(name, {})
        parts[entry.name.rpartition(".")[2]] = tensor
        if len(parts) == len(modules[name].entries):
            yield name, assemble(modules[name], arrived.pop(name), checkpoint, target.device)
            progress.add(pending[name])


def _iterate_pickle(
    source: ModelSource, config: ModelConfig, target: _Target, on_progress: OnProgress | None
) -> Iterator[tuple[str, Tensor]]:
    if config.checkpoint_quantization is not None:
        raise ModelLoadError(
            f"{source.name}: packed weights ({config.checkpoint_quantization.method}) need safetensors"
        )
    wanted: list[tuple[Tensor, _Pending]] = []
    for path in source.weight_files:
        for stored_name, tensor in _load_pickle(path).items():
            name = _final_name(stored_name, config)
            if name is not None:
                wanted.append((tensor, target.pending(name, tuple(tensor.shape), tensor.nbytes)))
    progress = _begin(source, config, target, [one for _, one in wanted], on_progress)
    for tensor, one in wanted:
        yield one.name, target.plain(tensor)
        progress.add(one)


def _load_pickle(path: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a broken pickle can raise nearly anything
        first_line = str(error).strip().partition("\n")[0]
        raise ModelLoadError(f"{path}: cannot be read as PyTorch weights: {first_line[:160]}") from error
    if not isinstance(loaded, dict):
        raise ModelLoadError(f"{path}: holds {type(loaded).__name__}, not a table of weights")
    return {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}


def _final_name(stored_name: str, config: ModelConfig) -> str | None:
    """The name a native model expects; None for a tensor it does not use. Other architectures keep every name."""
    if not config.is_native:
        return stored_name
    name = stored_name
    for prefix, replacement in _TEXT_PREFIXES:
        if name.startswith(prefix):
            name = replacement + name.removeprefix(prefix)
            break
    is_text = name.startswith("model.layers.") or name in (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    )
    is_buffer = name.endswith(("rotary_emb.inv_freq", ".attn.bias", ".masked_bias"))
    is_tied_head = name == "lm_head.weight" and config.tie_embeddings
    return name if is_text and not is_buffer and not is_tied_head else None


class _Progress:
    """Adds up bytes and tells the callback."""

    def __init__(self, total_bytes: int, on_progress: OnProgress | None) -> None:
        self._done_bytes = 0
        self._total_bytes = total_bytes
        self._on_progress = on_progress

    def add(self, one: _Pending) -> None:
        self._done_bytes += one.num_bytes
        if self._on_progress is not None:
            self._on_progress(self._done_bytes, self._total_bytes, one.name)


def _begin(
    source: ModelSource,
    config: ModelConfig,
    target: _Target,
    pending: list[_Pending],
    on_progress: OnProgress | None,
) -> _Progress:
    """Check names, shapes and memory before the first byte of data is read."""
    if config.is_native:
        is_packed = config.checkpoint_quantization is not None
        found = {one.name: one.shape for one in pending if not (is_packed and one.name.endswith(_CACHE_SCALES))}
        _check_complete(source.name, expected_shapes(config), found)
    if target.has_room:
        return _Progress(sum(one.num_bytes for one in pending), on_progress)
    names = [str(target.dtype).removeprefix("torch.")]
    names += [target.quantization.value] if target.quantization is not Quantization.NONE else []
    checkpoint = config.checkpoint_quantization
    names += [checkpoint.packing.value] if checkpoint is not None else []
    check_fits(source.name, sum(one.device_bytes for one in pending), " and ".join(names), target.device)
    return _Progress(sum(one.num_bytes for one in pending), on_progress)


def _check_complete(name: str, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    for tensor_name, shape in expected.items():
        if tensor_name not in found:
            raise ModelLoadError(f"{name}: tensor {tensor_name} is missing")
        if found[tensor_name] != shape:
            raise ModelLoadError(
                f"{name}: tensor {tensor_name} has shape {list(found[tensor_name])}, the config says {list(shape)}"
            )
    unknown = sorted(set(found) - set(expected))
    if unknown:
        raise ModelLoadError(f"{name}: tensor {unknown[0]} ({len(unknown)} such) is not part of the architecture")
