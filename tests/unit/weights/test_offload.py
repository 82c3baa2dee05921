"""A model's memory, taken away and put back under the same tensors."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from graphrunner.weights import offload
from graphrunner.weights.offload import ModelMemory

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.cuda)]


@dataclass(frozen=True, slots=True)
class Packed:
    data: torch.Tensor
    scale: torch.Tensor | None = None


class Toy(nn.Module):
    """Tensors in every place a model keeps some."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0, device=device).view(2, 3), requires_grad=False)
        self.packed = Packed(self.weight.data, torch.full((2,), 0.5, device=device))
        self.register_buffer("mask", torch.ones(4, device=device))
        self.tables = {"rope": [torch.full((5,), 7.0, device=device)]}
        self.name, self.host_only = "toy", torch.from_numpy(torch.zeros(3).numpy())
        self.child = nn.Linear(3, 2, device=device).requires_grad_(False)

    def tensors(self) -> list[torch.Tensor]:
        packed = [self.packed.data, self.packed.scale]
        return [self.weight, *packed, self.mask, self.tables["rope"][0], self.child.weight, self.child.bias]


@pytest.mark.parametrize("device", DEVICES)
def test_everything_goes_and_comes_back_as_it_was(device: str) -> None:
    toy = Toy(device)
    before = [tensor.clone() for tensor in toy.tensors()]
    memory = ModelMemory(toy)
    assert memory.num_bytes == 4 * (6 + 2 + 4 + 5 + 6 + 2)
    memory.move_to_host()
    sizes = [tensor.untyped_storage().nbytes() for tensor in toy.tensors()]
    assert all(sizes) if device == "cpu" else not any(sizes)
    memory.restore()
    assert all(torch.equal(*pair) for pair in zip(toy.tensors(), before, strict=True))
    assert toy.weight.data_ptr() == toy.packed.data.data_ptr()


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_checkpoint_brings_is_dropped_and_the_rest_kept(device: str) -> None:
    toy = Toy(device)
    memory = ModelMemory(toy)
    memory.drop_loaded()
    assert not any(t.untyped_storage().nbytes() for t in (toy.weight, toy.child.weight, toy.child.bias))
    memory.restore()
    toy.weight.data.fill_(3)
    assert (toy.packed.data == 3).all()
    assert (toy.packed.scale == 0.5).all() and (toy.tables["rope"][0] == 7).all() and toy.mask.all()


def test_others_are_never_dropped() -> None:
    toy, draft = Toy("cpu"), Toy("cpu")
    draft.child = toy.child
    expected = draft.weight.clone()
    memory = ModelMemory(toy, (draft,))
    memory.drop_loaded()
    assert not draft.child.weight.untyped_storage().nbytes()  # the target's own, shared
    memory.restore()
    assert torch.equal(draft.weight, expected)


def test_a_card_is_empty_after_a_drop_and_fails_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a card alone does, with the host in its place."""
    monkeypatch.setattr(offload, "_is_on_host", lambda device: False)
    toy = Toy("cpu")
    mask, rope = toy.mask.clone(), toy.tables["rope"][0].clone()
    memory = ModelMemory(toy)
    for _ in range(2):
        memory.drop_loaded()
        memory.move_to_host()
        assert not any(tensor.untyped_storage().nbytes() for tensor in toy.tensors())
    memory.restore()
    toy.weight.data.fill_(3)
    assert torch.equal(toy.mask, mask) and torch.equal(toy.tables["rope"][0], rope)
    assert (toy.packed.data == 3).all() and (toy.packed.scale == 0.5).all()


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (torch.OutOfMemoryError("no room"), pytest.raises(MemoryError, match="bytes of weights do not fit")),
        (RuntimeError("sizes differ"), pytest.raises(RuntimeError, match="sizes differ")),
    ],
    ids=["memory", "other"],
)
def test_a_restore_that_fails_takes_all_away_again(monkeypatch: pytest.MonkeyPatch, error: Exception, shown) -> None:
    toy = Toy("cpu")
    memory = ModelMemory(toy)
    memory.drop_loaded()
    real, calls = torch.UntypedStorage.resize_, []

    def resize(self: torch.UntypedStorage, size: int) -> object:
        calls.append(size)
        if size and len(calls) == 2:
            raise error
        return real(self, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize)
    with shown:
        memory.restore()
    assert not toy.weight.untyped_storage().nbytes() and not toy.child.weight.untyped_storage().nbytes()
    memory.restore()
    assert toy.weight.untyped_storage().nbytes() == 24
