"""Operands of one small-batch projection."""

from dataclasses import dataclass

from torch import Tensor

from graphrunner.kernels.triton.linear_config import LinearMode, LinearShape


@dataclass(frozen=True, slots=True)
class LinearCall:
    """Operands of one projection; see linear_kernels for the modes.

    Attributes:
        mode: what surrounds the product.
        x: [B, K], contiguous.
        norm_weight: float32 [K], or None for no norm.
        eps: of the norm.
        weight: [N, K] ([2N, K] when GATED), contiguous, dtype of x.
        bias: [N] ([2N] when GATED) or None.
        residual: [B, N] (RESIDUAL), read by the program that writes the same place of out.
        out: [B, N].
        is_gelu: activation of GATED: tanh GELU instead of SiLU.
    """

    mode: LinearMode
    x: Tensor
    norm_weight: Tensor | None
    eps: float
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    out: Tensor
    is_gelu: bool = False

    @property
    def shape(self) -> LinearShape:
        """Sizes as the table names them."""
        num_outputs = self.weight.shape[0] // (2 if self.mode is LinearMode.GATED else 1)
        return LinearShape(self.mode, num_outputs, self.weight.shape[1])
