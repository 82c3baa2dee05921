"""The frozen shape at which capture and replay meet."""

from dataclasses import dataclass
from enum import Enum


class ForwardMode(Enum):
    """What the rows of a step are doing."""

    __hash__ = object.__hash__  # see ForwardVariant

    DECODE = "decode"  # every request has one query token
    VERIFY = "verify"  # every request has the same number of query tokens, the last ones drafted
    PREFILL = "prefill"  # every request computes prompt tokens
    MIXED = "mixed"  # prompt chunks next to decode rows


class ForwardVariant(Enum):
    """What a recorded forward ends with."""

    __hash__ = object.__hash__  # keys are hashed a dozen times a step; the enum's own hash is a Python function

    LOGITS = "logits"  # logits of one token a request; sampled outside
    GREEDY = "greedy"  # argmax is part of the forward
    SAMPLE = "sample"  # temperature, top-k, top-p, min-p sampling is part of the forward
    HIDDEN = "hidden"  # hidden states of every token; an eager tail picks rows and computes logits


@dataclass(frozen=True, slots=True)
class ShapeKey:
    """A padded shape; both counts always, so that a number never means two things.

    An eager step has a key too: its exact size.
    """

    num_tokens: int
    num_reqs: int
    variant: ForwardVariant

    def __str__(self) -> str:
        return f"{self.num_tokens}t x {self.num_reqs}r {self.variant.value}"
