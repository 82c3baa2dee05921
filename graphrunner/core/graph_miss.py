"""Why a graph did not run: a reason and the two numbers behind it."""

from dataclasses import dataclass
from enum import Enum


class GraphMissReason(Enum):
    """Every "no" a runner can give. The value is the label used in metrics and logs."""

    OFF = "graphs are off for this phase"
    MODE = "this runner does not take this kind of step"
    NUM_REQS = "more requests than the largest captured size"
    NUM_TOKENS = "more tokens than the largest captured size"
    QUERY_LEN = "queries are not of the captured length"
    SEQ_LEN = "a sequence is longer than the captured limit"
    PADDING = "the next bucket would more than double the work"
    NOT_CAPTURED = "this size is not captured yet"
    CAPTURE_FAILED = "capturing this size failed"
    ALL_LOGITS = "prompt logprobs need the logits of every position"
    ATTENTION = "the attention backend does not support graphs here"


@dataclass(frozen=True, slots=True)
class GraphMiss:
    """One refusal.

    Attributes:
        reason: which rule said no.
        actual: the batch's number, in the rule's unit (requests or tokens); 0 where the rule has none.
        limit: the rule's number; 0 where it has none.
    """

    reason: GraphMissReason
    actual: int = 0
    limit: int = 0

    def __str__(self) -> str:
        numbers = f" ({self.actual} > {self.limit})" if self.actual or self.limit else ""
        return f"{self.reason.name}: {self.reason.value}{numbers}"
