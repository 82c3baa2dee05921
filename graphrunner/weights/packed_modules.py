"""Checkpoints of packed projections: which tensors make one weight, and that weight from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphrunner.config.checkpoint_quantization import CheckpointQuantization
from graphrunner.config.quantization import Quantization
from graphrunner.core.errors import ModelLoadError
from graphrunner.kernels.packed_weight import Weight, WeightLayout, pack_int4
from graphrunner.weights.safetensors_reader import SafetensorsEntry

_DATA = ("weight", "weight_packed", "qweight")
_SCALES = ("weight_scale_inv", "weight_scale", "scales")
_ZEROS = ("weight_zero_point", "qzeros")
_ORDER = "g_idx"
_BY_COLUMNS = ("gptq", "awq")  # methods that pack [K, N]
# Of activations, which are rounded at run time from what they are, or what the config says already.
_UNUSED = ("input_scale", "input_scale_inv", "input_zero_point", "input_scale_ub", "output_scale", "weight_shape")
_PACKED_DTYPES = {
    Quantization.FP8: "F8_E4M3",
    Quantization.FP8_BLOCK: "F8_E4M3",
    Quantization.INT8: "I8",
    Quantization.INT4: "I32",
}
_NIBBLES_PER_WORD = 8
_AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word of AWQ each of eight columns is


@dataclass(slots=True)
class PackedModule:
    """The tensors that one packed weight is made of: the last part of each name, and where it is."""

    name: str
    entries: dict[str, SafetensorsEntry] = field(default_factory=dict)

    def part(self, *names: str) -> SafetensorsEntry | None:
        """The entry under any of the names."""
        return next((self.entries[name] for name in names if name in self.entries), None)


def split_packed(
    entries: Mapping[str, SafetensorsEntry], quantization: CheckpointQuantization
) -> tuple[dict[str, SafetensorsEntry], dict[str, PackedModule]]:
    """Tell plain tensors from the parts of packed ones, by what is in the file.

    Args:
        entries: by final name.

    Returns:
        Plain entries by name, and packed modules by the name of their weight.

    Raises:
        ModelLoadError: a packed weight without a scale, in other numbers than the config says, or reordered.
    """
    plain: dict[str, SafetensorsEntry] = {}
    modules: dict[str, PackedModule] = {}
    for name, entry in entries.items():
        module, _, part = name.rpartition(".")
        if part in _UNUSED:
            continue
        if part == "weight_g_idx":
            raise ModelLoadError(f"tensor {name}: weights in another order than their inputs are not supported")
        is_packed = part in (*_SCALES, *_ZEROS, *_DATA[1:], _ORDER) or (
            part == "weight" and entry.dtype == _PACKED_DTYPES[quantization.packing]
        )
        if is_packed:
            modules.setdefault(f"{module}.weight", PackedModule(module)).entries[part] = entry
        else:
            plain[name] = entry
    for packed in modules.values():
        _check_parts(packed, quantization)
    return plain, modules


def _check_parts(module: PackedModule, quantization: CheckpointQuantization) -> None:
    wanted = _PACKED_DTYPES[quantization.packing]
    data, scale = module.part(*_DATA), module.part(*_SCALES)
    if data is None:
        raise ModelLoadError(f"tensor {module.name}.weight is missing or not {wanted}, but has a scale")
    if data.dtype != wanted:
        raise ModelLoadError(f"tensor {module.name}.weight is {data.dtype}, {quantization.method} says {wanted}")
    if scale is None:
        raise ModelLoadError(f"tensor {module.name}.weight_scale is missing: the weight is {data.dtype}")
    allowed = _scale_shapes(shape_of(module, quantization), quantization)
    if scale.shape not in allowed:
        shapes = " or ".join(str(list(shape)) for shape in allowed)
        raise ModelLoadError(
            f"tensor {module.name}.{scale.name.rpartition('.')[2]} has shape {list(scale.shape)}, expected {shapes}"
        )


def shape_of(module: PackedModule, quantization: CheckpointQuantization) -> tuple[int, ...]:
    """(N, K) of a module's weight, however it is packed."""
    data = module.part(*_DATA)
    assert data is not None
    if quantization.method in _BY_COLUMNS and len(data.shape) == 2:
        rows, columns = data.shape
        is_gptq = quantization.method == "gptq"
        return (columns, rows * _NIBBLES_PER_WORD) if is_gptq else (columns * _NIBBLES_PER_WORD, rows)
    if quantization.packing is Quantization.INT4 and len(data.shape) == 2:
        return data.shape[0], data.shape[1] * _NIBBLES_PER_WORD
    return data.shape


def _scale_shapes(shape: tuple[int, ...], quantization: CheckpointQuantization) -> list[tuple[int, ...]]:
    if len(shape) != 2:
        return []
    num_rows, width = shape
    if quantization.block is not None:
        rows, columns = quantization.block
        return [(-(-num_rows // rows), -(-width // columns))]
    if quantization.method in _BY_COLUMNS:
        if width % (quantization.group_size or width):
            raise ModelLoadError(
                f"model config: quantization_config.group_size={quantization.group_size} does not divide a projection "
                f"of {width} inputs"
            )
        return [(width // (quantization.group_size or width), num_rows)]
    if quantization.group_size:
        if width % quantization.group_size:
            raise ModelLoadError(
                f"model config: quantization_config.weights.group_size={quantization.group_size} does not divide "
                f"a projection of {width} inputs"
            )
        return [(num_rows, width // quantization.group_size)]
    return [(), (1,), (num_rows,), (num_rows, 1)]


def assemble(
    module: PackedModule, parts: Mapping[str, Tensor], quantization: CheckpointQuantization, device: torch.device
) -> Weight:
    """The weight of a module whose tensors have all been read.

    Args:
        parts: by the last part of their names.
        device: where it goes.

    Raises:
        ModelLoadError: inputs are in another order than their groups.
    """
    if quantization.method in _BY_COLUMNS:
        return _int4_by_columns(module.name, {name: one.to(device) for name, one in parts.items()}, quantization)
    data = next(parts[name] for name in _DATA if name in parts).to(device)
    scale = next(parts[name] for name in _SCALES if name in parts).to(device)
    if quantization.packing is Quantization.INT4:
        return _int4(data, scale, parts.get(_ZEROS[0]), quantization.group_size)
    if quantization.block is not None:
        rows, columns = quantization.block
        return Weight(WeightLayout.FP8, data, scale.float().contiguous(), group_size=columns, row_block=rows)
    layout = WeightLayout.INT8 if quantization.packing is Quantization.INT8 else WeightLayout.FP8
    return Weight(layout, data, scale.float().reshape(-1, 1).expand(data.shape[0], 1).contiguous())


def _int4(words: Tensor, scale: Tensor, zero_words: Tensor | None, group_size: int) -> Weight:
    """Eight numbers a word along a row, lowest bits first, each eight above its value.

    Source: the "pack-quantized" format of compressed-tensors.
    """
    numbers = _nibbles(words)
    num_rows, width = numbers.shape
    scale = scale.reshape(num_rows, -1).contiguous()
    if zero_words is None:
        zero = torch.full(scale.shape, 8, dtype=torch.uint8, device=scale.device)
    else:
        # Zeros are packed down the columns.
        zero = _nibbles(zero_words.to(scale.device).t().contiguous())[:, :num_rows].t().contiguous()
    group_size = group_size or width
    return Weight(WeightLayout.INT4, pack_int4(numbers, group_size), scale, zero, group_size)


def _int4_by_columns(name: str, parts: Mapping[str, Tensor], quantization: CheckpointQuantization) -> Weight:
    """Matrices that lie as [K, N]: scales and zeros [groups, N].

    Source: the files that AutoGPTQ and AutoAWQ write.
    """
    words, zero_words, scale = parts["qweight"], parts.get("qzeros"), parts["scales"].t().contiguous()
    if quantization.method == "gptq":
        numbers = _nibbles(words.t())
        zeros = None if zero_words is None else _nibbles(zero_words)
    else:
        numbers = _awq_nibbles(words).t()
        zeros = None if zero_words is None else _awq_nibbles(zero_words)
    width = numbers.shape[1]
    group_size = quantization.group_size or width
    order = parts.get(_ORDER)
    if order is not None and order.numel():
        expected = torch.arange(width, device=order.device) // group_size
        if not torch.equal(order.long(), expected):
            raise ModelLoadError(f"tensor {name}.g_idx: weights in another order than their inputs are not supported")
    zero = torch.full_like(scale, 8, dtype=torch.uint8) if zeros is None else zeros.t() + quantization.zero_offset
    data = pack_int4(numbers.contiguous(), group_size)
    return Weight(WeightLayout.INT4, data, scale, zero.contiguous(), group_size)


def _awq_nibbles(words: Tensor) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, 8 n], columns in order."""
    nibbles = _nibbles(words).view(words.shape[0], -1, _NIBBLES_PER_WORD)
    return nibbles[..., list(_AWQ_COLUMNS)].reshape(words.shape[0], -1)


def _nibbles(words: Tensor) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, 8 n]."""
    data = words.contiguous().view(torch.uint8)
    return torch.stack((data & 15, data >> 4), dim=-1).view(words.shape[0], -1)
