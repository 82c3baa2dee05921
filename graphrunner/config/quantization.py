"""In which numbers projections are kept: what a user asks for."""

from __future__ import annotations

from enum import Enum

from graphrunner.core.errors import ConfigError


class Quantization(Enum):
    """What projections are packed into at load time."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    FP8_BLOCK = "fp8_block"

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

    @property
    def of_head(self) -> Quantization:
        """The packing of the vocabulary's projection, whose rounding reaches the logits unsoftened: never 4 bits."""
        return Quantization.INT8 if self is Quantization.INT4 else self

    @property
    def bytes_per_weight(self) -> float | None:
        """Size of one packed weight, its share of the scales included; None for what is not packed."""
        return _BYTES_PER_WEIGHT.get(self)


_BYTES_PER_WEIGHT = {
    Quantization.INT8: 1.0,
    Quantization.INT4: 0.5 + 3 / 128,
    Quantization.FP8: 1.0,
    Quantization.FP8_BLOCK: 1.0,
}
