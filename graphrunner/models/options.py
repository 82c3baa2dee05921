"""How a model is built, apart from what it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrunner.config.quantization import Quantization
from graphrunner.layers.options import CPU, LayerOptions


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Where and in which numbers a model runs.

    Attributes:
        dtype: of activations.
        weight_dtype: of the matrices as they are kept; None is `dtype`. bfloat16 under float32 activations halves what
            a step reads and changes nothing when the checkpoint is bfloat16.
        device: where it lives.
        num_positions: rows of the rotary tables, at least the context limit; None takes the checkpoint's length.
        quantization: packing of the projections and the head (int8 under int4); embeddings stay dense.
        int8_group_size: inputs that share a scale; 0 is one scale per output row.
        trust_remote_code: whether the fallback may run code that comes with a checkpoint.
    """

    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None
    device: torch.device = CPU
    num_positions: int | None = None
    quantization: Quantization = Quantization.NONE
    int8_group_size: int = 0
    trust_remote_code: bool = False


def layer_options_of(options: ModelOptions) -> LayerOptions:
    """The part of a model's options that its layers read."""
    return LayerOptions(
        options.dtype,
        options.weight_dtype or options.dtype,
        options.device,
        options.quantization,
        options.int8_group_size,
    )
