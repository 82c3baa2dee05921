"""A traced forward cut at its eager breaks: pieces of operators with Python between them."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphrunner.device.graph import BreakCall, listening
from graphrunner.execution.backend import Forward
from graphrunner.execution.traced import TracedForward, trace_forward
from graphrunner.kernels.tracing import tracing

if TYPE_CHECKING:
    from graphrunner.core.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Piece:
    """Operators between two breaks.

    Attributes:
        module: takes the values called `inputs`, returns those called `outputs`.
        inputs, outputs: names of values of the whole forward.
    """

    module: GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Break:
    """Python between two pieces: reads the value `argument`, makes the value `output`."""

    call: BreakCall
    batch: ForwardBatch
    argument: str
    output: str


@dataclass(frozen=True, slots=True)
class SplitForward:
    """A forward as steps.

    Attributes:
        steps: pieces and breaks in the order they run.
        values: what is there before the first step (static views, weights), by name.
        results: names of the values that `traced.output` wants.
    """

    traced: TracedForward
    steps: tuple[Piece | Break, ...]
    values: dict[str, Tensor]
    results: tuple[str, ...]

    def last_uses(self) -> dict[str, int]:
        """The last step that reads a value, by the value's name; one past the steps for results."""
        uses: dict[str, int] = {}
        for index, step in enumerate(self.steps):
            read = (step.argument,) if isinstance(step, Break) else step.inputs
            uses |= dict.fromkeys(read, index)
        return uses | dict.fromkeys(self.results, len(self.steps))

    def is_brief(self, index: int, last_uses: dict[str, int]) -> bool:
        """Whether the value that the break at `index` makes is read by the piece after it and by nobody else."""
        step, following = self.steps[index], self.steps[index + 1 : index + 2]
        assert isinstance(step, Break)
        return all(isinstance(each, Piece) for each in following) and last_uses.get(step.output) == index + 1


def split_forward(forward: Forward) -> SplitForward:
    """Run `forward` once; its operators, cut at each `eager_break`. Raises as `trace_forward`."""
    tracer = _BreakTracer()
    token = _tracer.set(tracer)
    try:
        with listening(tracer):
            traced = trace_forward(forward)
    finally:
        _tracer.reset(token)
    nodes = list(traced.module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    (output,) = (node for node in nodes if node.op == "output")
    steps: list[Piece | Break] = []
    pending: list[Node] = []
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is not torch.ops.graphrunner.eager_break.default:
            pending.append(node)
            continue
        if pending:
            steps.append(_piece(pending))
        call, batch = tracer.calls[node.args[0]]  # type: ignore[index]
        steps.append(Break(call, batch, str(node.args[1]), node.name))
        pending = []
    if pending:
        steps.append(_piece(pending))
    values = {node.name: tensor for node, tensor in zip(placeholders, traced.inputs, strict=True)}
    results = tuple(str(value) for value in output.args[0])  # type: ignore[union-attr]
    return SplitForward(traced, tuple(steps), values, results)


def _piece(nodes: list[Node]) -> Piece:
    """The nodes as a graph of their own, with neutral names: equal layers give equal pieces, compiled once."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = Graph()
    copies = {node: graph.placeholder(f"in_{index}") for index, node in enumerate(inputs)}
    for index, node in enumerate(nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node]._rename(f"value_{index}")
    graph.output(tuple(copies[node] for node in outputs))
    graph.lint()
    module = GraphModule(torch.nn.Module(), graph)
    return Piece(module, tuple(node.name for node in inputs), tuple(node.name for node in outputs))


class _BreakTracer:
    """Puts one opaque operator into the trace where a break is, and remembers what to run there."""

    def __init__(self) -> None:
        self.calls: list[tuple[BreakCall, ForwardBatch]] = []

    def on_break(self, call: BreakCall, batch: ForwardBatch, tensor: Tensor) -> Tensor:
        """See `BreakListener.on_break`."""
        self.calls.append((call, batch))
        return torch.ops.graphrunner.eager_break(len(self.calls) - 1, tensor)


_tracer: ContextVar[_BreakTracer | None] = ContextVar("graphrunner_break_tracer", default=None)


def _run_break(index: int, tensor: Tensor) -> Tensor:
    tracer = _tracer.get()
    assert tracer is not None, "a break operator ran outside of a trace"
    call, batch = tracer.calls[index]
    with listening(None), tracing(False):
        return call(batch, tensor)


_library = torch.library.Library("graphrunner", "FRAGMENT")
_library.define("eager_break(int index, Tensor tensor) -> Tensor")
_library.impl("eager_break", _run_break, "CompositeExplicitAutograd")
