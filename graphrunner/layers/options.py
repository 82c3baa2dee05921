"""What every layer of a model is built with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrunner.config.quantization import Quantization

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Compute dtype, place, and packing of the projections.

    Attributes:
        dtype: of activations.
        weight_dtype: of dense matrices as they are kept; kernels widen them as they read.
        device: where weights live.
        quantization: what projections are packed into.
        int8_group_size: inputs that share an int8 scale; 0 is one scale per output row.
    """

    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    quantization: Quantization = Quantization.NONE
    int8_group_size: int = 0
