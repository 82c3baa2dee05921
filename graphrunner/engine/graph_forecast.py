"""How much memory a list of recordings will take, told by the first few of them."""

from __future__ import annotations

from collections.abc import Callable

_NUM_FIRST = 3
"""They bring what all share: kernels, workspaces, the pool of the largest shape. One size has that many variants."""
_NUM_SEEN = 6
"""Those after the first show what one more costs."""


class GraphForecast:
    """Listens to a capture, largest first.

    Args:
        used_bytes: of the device, now.
        num_graphs: in the list.
    """

    def __init__(self, used_bytes: Callable[[], int], num_graphs: int) -> None:
        self.num_graphs = num_graphs
        self._measure = used_bytes
        self._start = used_bytes()
        self._after: dict[int, int] = {}

    def recorded(self, count: int) -> None:
        """So many are done."""
        if count in (_NUM_FIRST, _NUM_SEEN, self.num_graphs) and count not in self._after:
            self._after[count] = self._measure() - self._start

    @property
    def estimated_bytes(self) -> int | None:
        """What the first ones let expect of all; None when nothing was recorded."""
        if self.num_graphs <= _NUM_SEEN:
            return self._after.get(self.num_graphs)
        if _NUM_SEEN not in self._after:
            return None
        first, seen = self._after[_NUM_FIRST], self._after[_NUM_SEEN]
        return first + (seen - first) * (self.num_graphs - _NUM_FIRST) // (_NUM_SEEN - _NUM_FIRST)
