"""Whether two results of the same arithmetic at two shapes are the same, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
_COARSE_TOLERANCE = 0.25
"""Of 8-bit numbers, where one rounding may go the other way."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The worst row of a comparison.

    Attributes:
        rows: every row that differs.
        num_rows: rows compared.
        error: of the worst: norm of the difference over the norm of the right row; infinite where one is not finite.
    """

    rows: tuple[int, ...]
    num_rows: int
    error: float

    def __str__(self) -> str:
        count = f"{len(self.rows)} of {self.num_rows} rows differ"
        return f"relative error {self.error:.3g}, {count}, the first is row {self.rows[0]}"


def tolerance_of(dtype: torch.dtype) -> float:
    """Largest relative error of a row that other tile shapes explain."""
    return _TOLERANCE.get(dtype, _COARSE_TOLERANCE)


def row_difference(
    right: Tensor, other: Tensor, dtype: torch.dtype | None = None, rows: list[int] | None = None
) -> Difference | None:
    """None when each row of `other` is close to that of `right`. Sync: reads back.

    Args:
        right: float [N, ...].
        other: as `right`, or with more rows, which are ignored.
        dtype: the numbers they were computed in, when that is not their own dtype.
        rows: those that count; None is all.
    """
    if right.numel() == 0:
        return None
    counting = list(range(right.shape[0])) if rows is None else rows
    a, b = (tensor[counting].flatten(1).to(right.device, torch.float64) for tensor in (right, other))
    # Minus infinity on both sides is agreement, as in logits that were masked.
    is_same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(is_same, 0.0, a - b).norm(dim=1)
    error = gap / torch.where(a.isfinite(), a, 0.0).norm(dim=1).clamp(min=1e-6)
    error = torch.where(gap.isfinite(), error, torch.inf)
    is_off = ~(error <= tolerance_of(dtype or right.dtype))
    if not bool(is_off.any()):
        return None
    off = tuple(counting[place] for place in is_off.nonzero()[:, 0].tolist())
    return Difference(off, right.shape[0], float(error.max()))


def are_ties(logits: Tensor, picked: Tensor, found: Tensor, dtype: torch.dtype) -> bool:
    """Whether each row's first token that differs is as likely as the best, up to rounding. Sync: reads back.

    Args:
        logits: float [at least R * W, V], of each place.
        picked, found: int [R] or [R, W], what was expected and what there is.
        dtype: the logits were computed in.
    """
    picked, found = picked.view(picked.shape[0], -1), found.view(found.shape[0], -1)
    is_off = picked != found
    rows = is_off.any(dim=1).nonzero()[:, 0]
    places = is_off.int().argmax(dim=1)[rows]
    tokens = found[rows, places].long()
    at = logits[rows * picked.shape[1] + places].double()
    if bool(((tokens < 0) | (tokens >= at.shape[1])).any()):
        return False
    gap = at.max(dim=1).values - at.gather(1, tokens.unsqueeze(1))[:, 0]
    size = torch.where(at.isfinite(), at, 0.0).square().mean(dim=1).sqrt()
    return bool((gap <= tolerance_of(dtype) * size).all())


def is_bit_equal(a: Tensor, b: Tensor) -> bool:
    """Every value the same, NaN included. Sync: reads back."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
