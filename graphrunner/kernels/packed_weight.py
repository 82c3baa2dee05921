"""What a projection multiplies by: the weights themselves, or small numbers with scales; one value for all kernels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

FP8_MAX = 448.0  # the largest float8_e4m3fn


class WeightLayout(Enum):
    """How the numbers of a weight are kept."""

    DENSE = "dense"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class Weight:
    """A projection's matrix as the kernels read it: N output rows, K inputs.

    Weight (n, k) is data[n, k] * scale[n // row_block, k // group_size]; for INT4, data[n, k] less the zero of that
    group. Note [int4 halves]: byte j of a group of G weights holds weight j in its low four bits and weight j + G / 2
    in its high ones, so that a kernel unpacks into two contiguous pieces and interleaves nothing.

    Attributes:
        layout: of `data`.
        data: float [N, K] when DENSE, int8 [N, K], float8_e4m3fn [N, K], or uint8 [N, K / 2] when INT4.
        scale: float32 (bfloat16 when INT4) [ceil(N / row_block), num_groups]; None when DENSE.
        zero: uint8 [N, num_groups], what INT4 numbers mean by 0; None for the others.
        group_size: inputs that share a scale; 0 is all K. The last group may be short.
        row_block: output rows that share a scale; the last block may be short.
    """

    layout: WeightLayout
    data: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    group_size: int = 0
    row_block: int = 1

    def __post_init__(self) -> None:
        assert (self.scale is None) == (self.layout is WeightLayout.DENSE), "a scale belongs to packed weights"
        assert (self.zero is None) == (self.layout is not WeightLayout.INT4), "a zero belongs to INT4"

    @property
    def is_dense(self) -> bool:
        """Whether `data` holds the weights themselves."""
        return self.layout is WeightLayout.DENSE

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), whatever the packing."""
        num_rows, width = self.data.shape
        return num_rows, width * 2 if self.layout is WeightLayout.INT4 else width

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it is made of."""
        return tuple(one for one in (self.data, self.scale, self.zero) if one is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes a kernel reads to see all of it."""
        return sum(one.nbytes for one in self.tensors)

    def is_like(self, other: Weight) -> bool:
        """Whether the two can be stacked by output row as they are."""
        kinds = [(one.layout, one.data.dtype, one.group_size, one.data.shape[1]) for one in (self, other)]
        return kinds[0] == kinds[1]

    def to(self, device: torch.device) -> Weight:
        """The same weight elsewhere."""
        moved = [None if one is None else one.to(device) for one in (self.data, self.scale, self.zero)]
        assert moved[0] is not None
        return Weight(self.layout, moved[0], moved[1], moved[2], self.group_size, self.row_block)


def dense_weight(data: Tensor) -> Weight:
    """A matrix as it is."""
    return Weight(WeightLayout.DENSE, data)


def unpack_int4(data: Tensor, group_size: int) -> Tensor:
    """The numbers of an INT4 weight: uint8 [N, K / 2] -> uint8 [N, K], 0 to 15. See Note [int4 halves]."""
    groups = data.view(data.shape[0], -1, group_size // 2)
    return torch.cat((groups & 15, groups >> 4), dim=-1).view(data.shape[0], -1)


def pack_int4(numbers: Tensor, group_size: int) -> Tensor:
    """The inverse of unpack_int4."""
    low, high = numbers.view(numbers.shape[0], -1, group_size).chunk(2, dim=-1)
    return (low | (high << 4)).reshape(numbers.shape[0], -1)


def dequantize(weight: Weight) -> Tensor:
    """The weights as numbers: float32 [N, K], or `data` itself when dense. The oracle of every packed kernel."""
    if weight.scale is None:
        return weight.data
    num_rows, width = weight.shape
    scale = weight.scale.float().repeat_interleave(weight.row_block, 0)[:num_rows]
    if weight.layout is WeightLayout.INT4:
        assert weight.zero is not None
        groups = unpack_int4(weight.data, weight.group_size).view(num_rows, scale.shape[1], -1).float()
        return ((groups - weight.zero.float().unsqueeze(-1)) * scale.unsqueeze(-1)).view(num_rows, width)
    if weight.group_size:
        scale = scale.repeat_interleave(weight.group_size, 1)[:, :width]
    return weight.data.float() * scale
