"""Rounding weights into the packed layouts, and stacking packed ones. Runs where the weights are.

int4 chooses its numbers as torchao's affine quantization does (a test compares the two), but needs no torchao.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graphrunner.config.quantization import Quantization
from graphrunner.core.errors import ConfigError
from graphrunner.kernels.packed_weight import FP8_MAX, Weight, WeightLayout, dense_weight, dequantize, pack_int4

FP8_BLOCK_SIZE = 128
INT4_GROUP_SIZES = (128, 64, 32)
_INT8_MAX = 127.0
_INT4_MAX = 15
_INT4_EPS = torch.finfo(torch.float32).eps
_TINY = torch.finfo(torch.float32).tiny
_ROWS_AT_ONCE = 8192  # of a matrix in float32: bounds the memory of rounding a large head; whole blocks of rows


def quantize(dense: Tensor, quantization: Quantization, int8_group_size: int = 0) -> Weight:
    """Round a matrix.

    Args:
        dense: float [N, K].
        quantization: into what; NONE keeps it.
        int8_group_size: inputs that share an int8 scale; 0, or a number that does not divide K, is the whole row.

    Raises:
        ConfigError: K has no int4 group size.
    """
    if quantization is Quantization.NONE:
        return dense_weight(dense)
    rounders: dict[Quantization, Callable[[Tensor], Weight]] = {
        Quantization.INT8: lambda rows: quantize_int8(rows, int8_group_size),
        Quantization.INT4: lambda rows: quantize_int4(rows, int4_group_size(dense.shape[1])),
        Quantization.FP8: quantize_fp8,
        Quantization.FP8_BLOCK: quantize_fp8_block,
    }
    return stack([rounders[quantization](rows) for rows in dense.split(_ROWS_AT_ONCE)])


def quantize_int8(dense: Tensor, group_size: int = 0) -> Weight:
    """Symmetric int8, one scale per output row or per group of `group_size` inputs. See `quantize`."""
    num_rows, width = dense.shape
    if group_size == 0 or width % group_size:
        group_size = width
    groups = dense.float().reshape(num_rows, width // group_size, group_size)
    scale = (groups.abs().amax(-1, keepdim=True) / _INT8_MAX).clamp_min(_TINY)
    data = (groups / scale).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8).view(num_rows, width)
    return Weight(WeightLayout.INT8, data, scale.squeeze(-1), group_size=0 if group_size == width else group_size)


def int4_group_size(width: int) -> int:
    """The largest group that divides K = `width`.

    Raises:
        ConfigError: none does.
    """
    for size in INT4_GROUP_SIZES:
        if width % size == 0:
            return size
    choices = ", ".join(map(str, INT4_GROUP_SIZES))
    raise ConfigError("quantization", "int4", f"a projection of {width} inputs is not a multiple of any of {choices}")


def quantize_int4(dense: Tensor, group_size: int) -> Weight:
    """Asymmetric int4: a group's smallest and largest number (0 among them) become 0 and 15. `group_size` divides K."""
    num_rows, width = dense.shape
    groups = dense.float().reshape(num_rows, width // group_size, group_size)
    low = groups.amin(-1, keepdim=True).clamp_max_(0.0)
    high = groups.amax(-1, keepdim=True).clamp_min_(0.0)
    # The scale is rounded first, so that numbers are chosen for the scale that will be used.
    scale = ((high - low) / _INT4_MAX).clamp_min_(_INT4_EPS).bfloat16()
    wide = scale.float()
    zero = (-low / wide).round_().clamp_(0, _INT4_MAX)
    numbers = ((groups / wide).round_() + zero).clamp_(0, _INT4_MAX).to(torch.uint8).view(num_rows, width)
    data = pack_int4(numbers, group_size)
    return Weight(WeightLayout.INT4, data, scale.squeeze(-1), zero.to(torch.uint8).squeeze(-1), group_size)


def quantize_fp8(dense: Tensor) -> Weight:
    """e4m3, one scale per output row."""
    wide = dense.float()
    scale = (wide.abs().amax(1, keepdim=True) / FP8_MAX).clamp_min_(_TINY)
    return Weight(WeightLayout.FP8, (wide / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale)


def quantize_fp8_block(dense: Tensor) -> Weight:
    """e4m3, one scale per block of 128 rows and 128 inputs; blocks at the edges may be short.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3.
    """
    size = FP8_BLOCK_SIZE
    num_rows, width = dense.shape
    padded = torch.nn.functional.pad(dense.float(), (0, -width % size, 0, -num_rows % size))
    blocks = padded.view(padded.shape[0] // size, size, padded.shape[1] // size, size)
    scale = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp_min_(_TINY)
    data = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    data = data.view(padded.shape)[:num_rows, :width].contiguous()
    return Weight(WeightLayout.FP8, data, scale, group_size=size, row_block=size)


def stack(parts: Sequence[Weight]) -> Weight:
    """One weight of several, by output row: in their layout when they share it, else dense.

    Blocks of rows survive when every part but the last is whole blocks; else each row gets its own scale.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if not all(first.is_like(part) for part in parts):
        return dense_weight(torch.cat([dequantize(part).float() for part in parts]))
    data = _cat([part.data for part in parts])
    if first.scale is None:
        return dense_weight(data)
    block = first.row_block
    is_aligned = all(part.row_block == block for part in parts) and all(p.shape[0] % block == 0 for p in parts[:-1])
    scales = [_scale(part) if is_aligned else _scale_by_row(part) for part in parts]
    zero = _cat([part.zero for part in parts if part.zero is not None]) if first.zero is not None else None
    return Weight(first.layout, data, _cat(scales), zero, first.group_size, block if is_aligned else 1)


def for_cpu(weight: Weight, dtype: torch.dtype) -> Weight:
    """The form that the CPU's kernels read: int8 stays, int4 becomes int8 in its own groups, fp8 is widened to `dtype`.

    The numbers are the packed ones, so results are those of the packed model; the memory is not.
    """
    if weight.layout in (WeightLayout.DENSE, WeightLayout.INT8):
        return weight
    if weight.layout is WeightLayout.FP8:
        return dense_weight(dequantize(weight).to(dtype))
    unit = Weight(
        weight.layout, weight.data, torch.ones_like(_scale(weight)), weight.zero, weight.group_size, weight.row_block
    )
    numbers = dequantize(unit).to(torch.int8)
    return Weight(WeightLayout.INT8, numbers, _scale(weight).float(), group_size=weight.group_size)


def _scale(weight: Weight) -> Tensor:
    assert weight.scale is not None
    return weight.scale


def _scale_by_row(weight: Weight) -> Tensor:
    return _scale(weight).repeat_interleave(weight.row_block, 0)[: weight.shape[0]]


def _cat(tensors: list[Tensor]) -> Tensor:
    """torch.cat that also takes fp8, whose concatenation not every device has."""
    if tensors[0].dtype is torch.float8_e4m3fn:
        return torch.cat([one.view(torch.uint8) for one in tensors]).view(torch.float8_e4m3fn)
    return torch.cat(tensors)
