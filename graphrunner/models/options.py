"""How a model is built, apart from what it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from graphrunner.core.errors import ConfigError
from graphrunner.layers.options import CPU


class Quantization(Enum):
    """What projections are packed into at load time."""

    NONE = "none"
    INT8 = "int8"

    @classmethod
    def from_name(cls, name: str | None) -> Quantization:
        """The member a user's flag names; None is NONE.

        Raises:
            ConfigError: no such packing.
        """
        try:
            return cls(name or "none")
        except ValueError:
            known = ", ".join(member.value for member in cls)
            raise ConfigError("quantization", name, f"must be one of {known}") from None


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Where and in which numbers a model runs.

    Attributes:
        dtype: of activations.
        weight_dtype: of the matrices as they are kept; None is `dtype`. bfloat16 under float32 activations halves what
            a step reads and changes nothing when the checkpoint is bfloat16.
        device: where it lives.
        num_positions: rows of the rotary tables, at least the context limit; None takes the checkpoint's length.
        quantization: packing of the projections and the head; embeddings stay dense.
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
