"""A graph for devices that have none: a tape of the operators that ran, played again into the same tensors.

It keeps a graph's rules (static addresses, nothing read back, no Python in between), so the backends that are written
for device graphs can be tested without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphrunner.device.device import DeviceGraph, GraphPool

Operator = Callable[..., object]
_READS_BACK = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::item"})


@dataclass(frozen=True, slots=True)
class _Entry:
    """One operator call; `results` are the tensors whose storage the call made, to be written again."""

    operator: Operator
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    results: tuple[torch.Tensor, ...]


class _Listener(TorchDispatchMode):
    """Sees every operator. No compiler looks at its code, and torch need not load one to be told so: that takes
    seconds, at the first operator that is seen."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Tape(_Listener):
    def __init__(self) -> None:
        super().__init__()
        self.entries: list[_Entry] = []

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        named = dict(kwargs or {})
        schema = func._schema  # type: ignore[attr-defined]
        if schema.name in _READS_BACK:
            raise RuntimeError(f"{schema.name} reads a value back to the host, which a recorded graph cannot do")
        out = func(*args, **named)
        inputs = {_storage(leaf) for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)}
        made = tuple(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        fresh = tuple(tensor for tensor in made if _storage(tensor) not in inputs)
        # A view of something older needs no replay: it still looks at the same memory.
        if fresh or schema.is_mutable:
            self.entries.append(_Entry(func, args, named, fresh))
        return out


class OperatorCount(_Listener):
    """Counts, while it is entered, the operators that a tape would keep: what computes, not what only looks."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        named = dict(kwargs or {})
        out = func(*args, **named)
        inputs = {_storage(leaf) for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)}
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        is_new = any(_storage(tensor) not in inputs for tensor in made)
        self.count += is_new or func._schema.is_mutable  # type: ignore[attr-defined]
        return out


class TapeGraph(DeviceGraph):
    """See the module. Operators that are not torch operators (a raw Triton launch) do not reach a tape."""

    def __init__(self) -> None:
        self._entries: Sequence[_Entry] = ()
        self._tape: _Tape | None = None

    def begin(self) -> None:
        """See `DeviceGraph.begin`."""
        self._tape = _Tape()
        self._tape.__enter__()

    def end(self) -> None:
        """See `DeviceGraph.end`."""
        assert self._tape is not None, "end without begin"
        self._tape.__exit__(None, None, None)
        self._entries, self._tape = tuple(self._tape.entries), None

    def replay(self) -> None:
        """See `DeviceGraph.replay`."""
        for entry in self._entries:
            out = entry.operator(*entry.args, **entry.kwargs)
            if entry.results:
                made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
                for kept, new in zip(entry.results, made, strict=True):
                    kept.copy_(new)

    def num_nodes(self) -> int:
        """Operators on the tape."""
        return len(self._entries)

    def release(self) -> None:
        """See `DeviceGraph.release`."""
        if self._tape is not None:  # recording was broken off
            self._tape.__exit__(None, None, None)
            self._tape = None
        self._entries = ()


class TapePool(GraphPool):
    """Tapes take their memory where everyone does."""

    def new_graph(self) -> DeviceGraph:
        """See `GraphPool.new_graph`."""
        return TapeGraph()

    def release(self) -> None:
        """See `GraphPool.release`."""


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
