"""How the hidden states of a prompt become one vector."""

import math
from collections.abc import Sequence
from enum import Enum


class Pooling(Enum):
    """Over the hidden states after the model's final norm."""

    MEAN = "mean"  # of every token
    LAST = "last"  # of the last token, the only one that has seen the whole prompt


def unit_vector(vector: Sequence[float]) -> list[float] | None:
    """The vector at length 1; None when it has no direction: zero, or not finite."""
    length = math.sqrt(math.fsum(value * value for value in vector))
    return [value / length for value in vector] if length > 0 and math.isfinite(length) else None
