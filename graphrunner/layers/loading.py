"""How a checkpoint's tensors find their place: every module names its slots, the model fills each exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from graphrunner.core.errors import ModelLoadError
from graphrunner.kernels.packed_weight import Weight


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A place for one checkpoint tensor.

    Attributes:
        name: of the tensor in the checkpoint, relative to the module that yields the slot.
        shape: that it must have.
        put: takes the tensor; copies it, so the source may be a view of a mapped file.
        put_packed: takes a packed matrix; None where the checkpoint must hold plain numbers.
        is_optional: whether a checkpoint may lack it.
    """

    name: str
    shape: tuple[int, ...]
    put: Callable[[Tensor], None]
    put_packed: Callable[[Weight], None] | None = None
    is_optional: bool = False


class HasWeightSlots(Protocol):
    """A module that takes tensors of a checkpoint."""

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every tensor the module needs."""


def prefixed(prefix: str, *modules: HasWeightSlots) -> Iterator[WeightSlot]:
    """The slots of `modules` under a longer name."""
    for module in modules:
        for slot in module.weight_slots():
            yield replace(slot, name=prefix + slot.name)


def fill_slots(
    slots: Iterable[WeightSlot], weights: Iterable[tuple[str, Tensor | Weight]], *, checkpoint_name: str = ""
) -> None:
    """Fill every slot from a stream of named tensors, in the stream's order.

    Args:
        checkpoint_name: stands before what is raised, where there is more than one checkpoint.

    Raises:
        ModelLoadError: a tensor that has no slot, comes twice, has another shape, or never comes.
    """
    waiting = {slot.name: slot for slot in slots}
    filled: set[str] = set()
    start = f"{checkpoint_name}: tensor" if checkpoint_name else "tensor"
    for name, tensor in weights:
        slot = waiting.pop(name, None)
        if slot is None:
            problem = "comes twice" if name in filled else "is not part of the architecture"
            raise ModelLoadError(f"{start} {name} {problem}")
        if tuple(tensor.shape) != slot.shape:
            raise ModelLoadError(f"{start} {name} has shape {list(tensor.shape)}, expected {list(slot.shape)}")
        if isinstance(tensor, Tensor):
            slot.put(tensor)
        elif slot.put_packed is not None:
            slot.put_packed(tensor)
        else:
            raise ModelLoadError(f"{start} {name} is packed as {tensor.layout.value}, where plain numbers are needed")
        filled.add(name)
    missing = [name for name, slot in waiting.items() if not slot.is_optional]
    if missing:
        others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelLoadError(f"{start} {missing[0]} is missing{others}")
