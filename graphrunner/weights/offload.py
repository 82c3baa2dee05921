"""Everything a model keeps on its device, taken away and put back under the same tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class _Block:
    """One storage; `host` holds its bytes while it is empty, unless they are dropped."""

    storage: torch.UntypedStorage
    device: torch.device
    num_bytes: int
    is_on_host: bool  # nothing is gained by moving it
    is_loaded: bool  # filled from the checkpoint, so it can be filled again
    host: Tensor | None = None

    @property
    def is_away(self) -> bool:
        return self.storage.nbytes() == 0

    def bytes(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)  # type: ignore[call-overload]


class ModelMemory:
    """The storages under a model's tensors: parameters, buffers, and what its modules hold besides.

    Tensors stay the same objects. Their addresses change, so graphs that read them must be recorded again.

    Args:
        model: loaded.
        others: modules that go with it (a draft), but that its checkpoint does not fill.
    """

    def __init__(self, model: nn.Module, others: Iterable[nn.Module] = ()) -> None:
        loaded = {_address(tensor) for parameter in model.parameters() for tensor in _plain(parameter)}
        self._blocks: dict[int, _Block] = {}
        for tensor in (tensor for module in (model, *others) for tensor in _tensors(module)):
            storage, address = tensor.untyped_storage(), _address(tensor)
            if address and storage.resizable() and address not in self._blocks:
                self._blocks[address] = _Block(
                    storage, tensor.device, storage.nbytes(), _is_on_host(tensor.device), address in loaded
                )

    @property
    def num_bytes(self) -> int:
        """Bytes on the device when nothing is taken away."""
        return sum(block.num_bytes for block in self._blocks.values())

    def move_to_host(self) -> None:
        """Take everything off an accelerator. Nothing happens to what is on the host already, or away."""
        for block in self._blocks.values():
            if not block.is_on_host and not block.is_away:
                block.host = block.bytes().to("cpu", copy=True)
                block.storage.resize_(0)

    def drop_loaded(self) -> None:
        """Take everything off the device, and keep only what the checkpoint does not bring again."""
        for block in self._blocks.values():
            if block.is_loaded:
                block.storage.resize_(0)
        self.move_to_host()

    def restore(self) -> None:
        """Bring everything back; what was dropped holds anything, to be loaded.

        Raises:
            MemoryError: the device has not that much; all is taken away again, as it is after any other error.
        """
        brought = [block for block in self._blocks.values() if block.is_away]
        try:
            for block in brought:
                block.storage.resize_(block.num_bytes)
                if block.host is not None:
                    block.bytes().copy_(block.host)
        except BaseException as cause:
            for block in brought:
                block.storage.resize_(0)
            if isinstance(cause, torch.OutOfMemoryError):
                raise MemoryError(f"{self.num_bytes} bytes of weights do not fit") from cause
            raise
        for block in brought:
            block.host = None


def _is_on_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Every tensor that the modules of a model hold, as parameter, buffer or plain attribute. Some come twice."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield from _plain(tensor)
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _held(value)


def _held(value: object, depth: int = 0) -> Iterator[Tensor]:
    """Tensors inside plain values: records, tuples, lists and dictionaries, a few levels deep."""
    if isinstance(value, Tensor):
        yield from _plain(value)
    elif depth < 4:
        children: object = ()
        if isinstance(value, dict):
            children = value.values()
        elif isinstance(value, list | tuple):
            children = value
        elif is_dataclass(value) and not isinstance(value, type):
            children = (getattr(value, field.name) for field in fields(value))
        for child in children:  # type: ignore[attr-defined]
            yield from _held(child, depth + 1)


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor itself, or those a packed one (a subclass of its own) is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
