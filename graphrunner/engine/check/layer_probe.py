"""The outputs of every layer of two runs of one model, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphrunner.engine.check.compare import Difference, row_difference


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """The first layer, in the order of execution, whose rows differ."""

    layer: str
    difference: Difference


class LayerProbe:
    """Hooks on every module of a model while a `with` block runs; nothing before and after.

    Args:
        model: its modules give the names. Anything that is no `nn.Module` has no layers to tell apart.
        dtype: the model's, which sets the tolerance.
        counting: the tokens of the step that somebody reads.
        num_tokens: how many there are in all.
    """

    def __init__(self, model: object, dtype: torch.dtype, counting: list[int], num_tokens: int) -> None:
        modules = model.named_modules() if isinstance(model, nn.Module) else ()
        self._modules = [(name, module) for name, module in modules if name]
        self._dtype = dtype
        self._counting = counting
        self._num_tokens = num_tokens
        self._recorded: list[tuple[str, Tensor]] = []
        self._place = 0
        self.found: LayerDifference | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep each layer's output, on the host. Sync: reads back."""
        self._recorded = []
        with self._hooked(lambda name, rows: self._recorded.append((name, rows.to("cpu", copy=True)))):
            yield

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Compare each layer's output with the recorded one; `found` is the first that differs. Sync: reads back."""
        self._place, self.found = 0, None
        with self._hooked(self._compare):
            yield

    def _compare(self, name: str, rows: Tensor) -> None:
        if self.found is not None or self._place >= len(self._recorded):
            return
        expected_name, expected = self._recorded[self._place]
        self._place += 1
        if expected_name != name or rows.shape[1:] != expected.shape[1:] or rows.shape[0] < expected.shape[0]:
            return  # the two runs took different ways here; what follows is compared by the outputs
        counting = self._counting if expected.shape[0] == self._num_tokens else None
        difference = row_difference(expected, rows, self._dtype, counting)
        if difference is not None:
            self.found = LayerDifference(name, difference)

    @contextmanager
    def _hooked(self, take) -> Iterator[None]:  # type: ignore[no-untyped-def]
        def hook_of(name: str):  # type: ignore[no-untyped-def]
            def hook(module: nn.Module, args: object, output: object) -> None:
                rows = rows_of(output)
                if rows is not None:
                    take(name, rows)

            return hook

        handles = [module.register_forward_hook(hook_of(name)) for name, module in self._modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def rows_of(output: object) -> Tensor | None:
    """The tokens' rows in what a layer returned: [N, ...]; None when it returned something else."""
    if isinstance(output, (tuple, list)):
        output = output[0] if output else None
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() < 2:
        return None
    return output[0] if output.dim() > 2 and output.shape[0] == 1 else output
