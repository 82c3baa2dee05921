"""Root-mean-square norms. Their arithmetic is fused into what follows; here is their weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from graphrunner.layers import ops
from graphrunner.layers.loading import WeightSlot


class RMSNorm(nn.Module):
    """The weight of an RMSNorm, float32 [size].

    Args:
        name: in the checkpoint.
        size: width of the normalised rows.
        eps: added to the mean square.
        device: where the weight lives.
        offset: added to the checkpoint's values (Gemma keeps w of a factor 1 + w).

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    def __init__(self, name: str, size: int, eps: float, device: torch.device, offset: float = 0.0) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32, device=device), requires_grad=False)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{self.name}.weight", tuple(self.weight.shape), self._put)

    def _put(self, tensor: Tensor) -> None:
        self.weight.data.copy_(tensor.float() + self.offset)


class NormResidual(RMSNorm):
    """Norm of a branch's output, then the sum with the residual stream: [T, K], [T, K] -> [T, K]."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return ops.norm_residual(x, self.weight, self.eps, residual)
