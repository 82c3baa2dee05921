"""A closure turned into a graph of operators, with everything it reads lifted to inputs.

The graph is what compiling backends compile, and its text is what names an artefact on disk: a changed model, shape or
line of code gives another graph, so a stale artefact cannot be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from graphrunner.core.outputs import ModelOutput
from graphrunner.execution.backend import Forward
from graphrunner.kernels.tracing import tracing

_FIELDS = tuple(field.name for field in fields(ModelOutput))
_HALF_TOLERANCE = 8e-2
"""Largest error of a row, as a part of its length: what `--check-graphs` allows bfloat16."""


@dataclass(frozen=True, slots=True)
class TracedForward:
    """Operators of one forward.

    Attributes:
        module: takes `inputs`, returns the outputs that are there, in the order of `fields`.
        inputs: static views and weights, in the order of the module's placeholders.
        fields: which fields of `ModelOutput` come back.
    """

    module: GraphModule
    inputs: tuple[Tensor, ...]
    fields: tuple[str, ...]

    def output(self, results: Sequence[Tensor]) -> ModelOutput:
        """The module's results by name."""
        return ModelOutput(**dict(zip(self.fields, results, strict=True)))

    def text(self) -> str:
        """Operators, and type, shape and layout of every input: equal text, equal program."""
        shapes = [f"{t.dtype} {tuple(t.shape)} {t.stride()} {t.device}" for t in self.inputs]
        return "\n".join([self.module.code, ",".join(self.fields), *shapes])


def check_equal(expected: ModelOutput, compiled: ModelOutput, *, is_half: bool = False) -> None:
    """Whether a compiled graph gives what the closure gives, up to rounding. Sync: reads back.

    Args:
        is_half: computed in 16-bit numbers, of which joined operators round fewer. Tokens are not compared then, for
            the best two logits are often the same number.

    Raises:
        ValueError: they disagree: something was not traced.
    """
    for name in _FIELDS:
        right, other = getattr(expected, name), getattr(compiled, name)
        if right is not None and not (_is_near(right, other) if is_half else _is_close(right, other)):
            raise ValueError(f"the compiled graph does not give the {name} that the forward gives")


def _is_close(right: Tensor, other: Tensor) -> bool:
    return torch.allclose(right.float(), other.float(), rtol=1e-2, atol=1e-2, equal_nan=True)


def _is_near(right: Tensor, other: Tensor) -> bool:
    """Whether each row is off by a small part of its length."""
    if not right.is_floating_point():
        return True
    gap = torch.where(right.isnan() & other.isnan(), 0.0, right.float() - other.float()).norm(dim=-1)
    size = torch.where(right.isfinite(), right.float(), 0.0).norm(dim=-1)
    return bool((gap <= _HALF_TOLERANCE * size.clamp(min=1e-6)).all())


def trace_forward(forward: Forward) -> TracedForward:
    """Run `forward` once and keep its operators.

    Raises:
        RuntimeError: it reads a value back to the host, so its operators depend on what the tensors held.

    The GPU's own kernels give way to operators (`graphrunner.kernels.tracing`). What else is not an operator (a raw
    launch in foreign code) runs, but is not traced; `check_equal` finds it.
    """
    names: list[str] = []

    def flat() -> list[Tensor]:
        output = forward()
        names[:] = [name for name in _FIELDS if getattr(output, name) is not None]
        return [getattr(output, name) for name in names]

    with tracing():
        module = make_fx(flat, tracing_mode="real")()
    graph, inputs = _lift(module)
    return TracedForward(GraphModule(torch.nn.Module(), graph), inputs, tuple(names))


def _lift(module: GraphModule) -> tuple[Graph, tuple[Tensor, ...]]:
    """Make every tensor that the graph refers to an input of it."""
    targets = list(dict.fromkeys(node.target for node in module.graph.nodes if node.op == "get_attr"))
    lifted = Graph()
    placeholders = {target: lifted.placeholder(f"in_{index}") for index, target in enumerate(targets)}
    copies: dict[Node, Node] = {}
    for node in module.graph.nodes:
        is_tensor = node.op == "get_attr"
        copies[node] = placeholders[node.target] if is_tensor else lifted.node_copy(node, copies.__getitem__)
        copies[node].type = None  # an annotation kept as text is what the compiler's cache cannot digest
    lifted.lint()
    return lifted, tuple(getattr(module, str(target)) for target in targets)
