"""What the graph check found: one fault, with everything a report of it needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from graphrunner.core.shape_key import ShapeKey


class FindingKind(Enum):
    """Whose fault it is; the value is the sentence of the report."""

    STATIC_BUFFER = "a static buffer does not hold what the step needs"
    LAYER = "the padded forward differs from eager, first in this layer"
    SAMPLING = "the logits are right and the tokens picked from them inside the graph are not"
    RECORDING = "the recording differs from its own closure: it reads memory that was replaced or changed after capture"
    ROWS = "the request table was not advanced as the step says"
    OUTPUT = "an output was overwritten before it was read"
    STRAY_WRITE = "a page was written while nobody owned it"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault.

    Attributes:
        kind: whose fault.
        where: the layer, buffer, output or page.
        detail: the numbers that differ.
        runner, key, step_id: which replay; of a stray write, the one after it.
        requests: "id (row 3)" of each request whose rows differ; all of the step's where none stands out.
    """

    kind: FindingKind
    where: str
    detail: str
    runner: str
    key: ShapeKey
    step_id: int
    requests: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"step {self.step_id}, {self.runner} {self.key}: {self.kind.value}: {self.where}: {self.detail}; "
            f"requests {', '.join(self.requests)}"
        )
