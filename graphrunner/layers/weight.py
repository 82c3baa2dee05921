"""What a projection multiplies by: dense, or integers with scales; one value for the fused ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_INT8_MAX = 127.0


@dataclass(frozen=True, slots=True)
class Weight:
    """A projection's matrix as the kernels read it.

    Attributes:
        data: [N, K]; the model's dtype when dense, int8 when quantized.
        scale: float32 [N] or [N, num_groups] (num_groups divides K); None when dense.
    """

    data: Tensor
    scale: Tensor | None = None

    @property
    def is_dense(self) -> bool:
        """Whether `data` holds the weights themselves."""
        return self.scale is None


def quantize_int8(dense: Tensor, group_size: int = 0) -> Weight:
    """Round a weight to int8, symmetric, one scale per output row or per group of `group_size` inputs.

    Args:
        dense: float [N, K].
        group_size: inputs that share a scale; 0, or a number that does not divide K, means the whole row.
    """
    num_rows, width = dense.shape
    num_groups = width // group_size if group_size and width % group_size == 0 else 1
    groups = dense.float().view(num_rows, num_groups, -1)
    scale = (groups.abs().amax(-1, keepdim=True) / _INT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    data = (groups / scale).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8).view(num_rows, width)
    scale = scale.view(num_rows) if num_groups == 1 else scale.view(num_rows, num_groups)
    return Weight(data, scale.contiguous())
