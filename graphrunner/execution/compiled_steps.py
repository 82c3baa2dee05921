"""One recording of the piecewise backend: compiled pieces with breaks between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._inductor import CompiledArtifact

from graphrunner.core.outputs import ModelOutput
from graphrunner.device.device import DeviceGraph
from graphrunner.device.graph import BreakCall, listening
from graphrunner.execution.backend import Forward, batch_at_break
from graphrunner.execution.split import Break
from graphrunner.kernels.tracing import tracing

if TYPE_CHECKING:
    from graphrunner.core.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class CompiledPiece:
    """A compiled piece on a device without graphs: called, its results copied to where they are looked for."""

    artifact: CompiledArtifact
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def run(self) -> None:
        """Call it."""
        for kept, new in zip(self.outputs, self.artifact(*self.inputs), strict=True):
            if kept.data_ptr() != new.data_ptr():
                kept.copy_(new)


@dataclass(frozen=True, slots=True)
class RecordedPiece:
    """A piece that was compiled and then recorded: one launch."""

    graph: DeviceGraph

    def run(self) -> None:
        """Replay it. Sync: none."""
        self.graph.replay()


@dataclass(frozen=True, slots=True)
class CompiledBreak:
    """Python between two pieces, and the tensor in which the next one expects its result."""

    step: Break
    argument: Tensor
    output: Tensor

    def run(self, active: ForwardBatch) -> None:
        """Call it with the batch that runs now."""
        result = self.step.call(batch_at_break(self.step.batch, active), self.argument)
        if result.data_ptr() != self.output.data_ptr():
            self.output.copy_(result)

    def pretend(self) -> None:
        """Leave what `stand_in` makes."""
        self.output.copy_(stand_in(self.argument, self.output))


@dataclass(slots=True)
class CompiledSteps:
    """Everything that one key replays.

    Attributes:
        steps: in order.
        output: where the results are.
        held: memory that recorded pieces read and nobody else may own (constants of the forward).
    """

    steps: list[CompiledPiece | RecordedPiece | CompiledBreak] = field(default_factory=list)
    output: ModelOutput = field(default_factory=ModelOutput)
    held: tuple[Tensor, ...] = ()

    def replay(self, batch: ForwardBatch) -> ModelOutput:
        """Piece, break, piece, ... Breaks see `batch`. Sync: whatever they do."""
        for step in self.steps:
            if isinstance(step, CompiledBreak):
                step.run(batch)
            else:
                step.run()
        return self.output

    def pretend(self) -> ModelOutput:
        """A replay with `stand_in` at the breaks."""
        for step in self.steps:
            if isinstance(step, CompiledBreak):
                step.pretend()
            else:
                step.run()
        return self.output

    def pretended(self, forward: Forward) -> ModelOutput:
        """What `pretend` should give: `forward` in plain operators, with the same at its breaks."""
        with tracing(), listening(_Pretender([step for step in self.steps if isinstance(step, CompiledBreak)])):
            return forward()

    @property
    def is_half(self) -> bool:
        """Whether it computes in 16-bit numbers."""
        return any(isinstance(step, CompiledBreak) and step.output.dtype.itemsize == 2 for step in self.steps)

    def num_graph_nodes(self) -> int:
        """Kernels in all graphs together; 0 without graphs."""
        return sum(step.graph.num_nodes() for step in self.steps if isinstance(step, RecordedPiece))

    def release(self) -> None:
        """Give the graphs back. Idempotent."""
        for step in self.steps:
            if isinstance(step, RecordedPiece):
                step.graph.release()
        self.steps.clear()
        self.output, self.held = ModelOutput(), ()


def stand_in(argument: Tensor, output: Tensor) -> Tensor:
    """The numbers of `argument`, in the shape and dtype of `output`: for checks, in place of attention.

    What attention leaves in padding rows is unspecified, so two runs of one forward need not agree in them; and a
    capture has nothing but padding.
    """
    flat = argument.flatten()
    repeats = -(-output.numel() // flat.numel())
    return flat.repeat(repeats)[: output.numel()].view(output.shape).to(output.dtype)


class _Pretender:
    """Answers the breaks of one forward with stand-ins, in the shapes of their real results."""

    def __init__(self, breaks: list[CompiledBreak]) -> None:
        self._outputs = iter([each.output for each in breaks])

    def on_break(self, call: BreakCall, batch: ForwardBatch, tensor: Tensor) -> Tensor:
        """See `BreakListener.on_break`."""
        return stand_in(tensor, next(self._outputs))


def apart(outputs: list[Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`outputs` in memory of their own: an input's memory is given to others as soon as no later step names it."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return tuple(out.clone() if out.untyped_storage().data_ptr() in taken else out for out in outputs)


class BreakMemory:
    """Where the results of breaks lie: one place for all that the next piece alone reads, whatever their key.

    Not in the graphs' pool, for they are written between graphs.
    """

    def __init__(self) -> None:
        self._shared: dict[torch.dtype, Tensor] = {}

    def place(self, result: Tensor, *, is_brief: bool) -> Tensor:
        """A tensor with the values of `result`; `is_brief`: nobody reads it after the next piece has run."""
        if not is_brief or not result.is_contiguous():
            return result
        flat = self._shared.get(result.dtype)
        if flat is None or flat.numel() < result.numel():
            flat = self._shared[result.dtype] = torch.empty_like(result).flatten()
        place = flat[: result.numel()].view(result.shape)
        return place.copy_(result)

    def clear(self) -> None:
        """Let go; recordings hold on to their own places."""
        self._shared.clear()
