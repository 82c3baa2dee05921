"""Capture sizes fitted to a workload: the least expected padding under a budget of graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def plan_capture_sizes(
    observed: Sequence[int], max_graphs: int, *, largest: int | None = None, bytes_per_graph: int = 0,
    max_bytes: int | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """Choose the sizes that waste the fewest padded rows over a workload.

    Args:
        observed: batch sizes (or token counts) seen, each at least 1; repeats weigh.
        max_graphs: most sizes to choose, at least 1.
        largest: a size that must be served as well, the limit of the engine.
        bytes_per_graph, max_bytes: a memory budget; it lowers max_graphs.

    Returns:
        Sizes in rising order; every observed size fits in one. Optimal by dynamic programming over the distinct
        sizes: an optimal plan only ever uses observed sizes (and `largest`). Cost: O(distinct^2 * max_graphs).
    """
    if max_bytes is not None and bytes_per_graph > 0:
        max_graphs = min(max_graphs, max_bytes // bytes_per_graph)
    weights = Counter(observed)
    if largest is not None:
        weights[largest] += 0
    sizes = sorted(weights)
    if not sizes or max_graphs < 1:
        return ()
    count = len(sizes)
    prefix_weight = [0] * (count + 1)
    prefix_rows = [0] * (count + 1)
    for index, size in enumerate(sizes):
        prefix_weight[index + 1] = prefix_weight[index] + weights[size]
        prefix_rows[index + 1] = prefix_rows[index] + weights[size] * size

    def waste(start: int, end: int) -> int:
        """Padding when sizes[start:end] all run at sizes[end - 1]."""
        return sizes[end - 1] * (prefix_weight[end] - prefix_weight[start]) - (prefix_rows[end] - prefix_rows[start])

    best = [waste(0, end) if end else 0 for end in range(count + 1)]
    cuts: list[list[int]] = [[0] * (count + 1)]
    for _ in range(1, min(max_graphs, count)):
        following, cut = best[:], [0] * (count + 1)
        for end in range(1, count + 1):
            cut[end] = min(range(end), key=lambda start: (best[start] + waste(start, end), -start))
            following[end] = min(best[end], best[cut[end]] + waste(cut[end], end))
            if following[end] == best[end] and best[cut[end]] + waste(cut[end], end) > best[end]:
                cut[end] = -1
        best = following
        cuts.append(cut)
    return _trace_back(sizes, cuts, count)


def _trace_back(sizes: list[int], cuts: list[list[int]], count: int) -> tuple[int, ...]:
    chosen: list[int] = []
    end, layer = count, len(cuts) - 1
    while end > 0:
        while cuts[layer][end] == -1:
            layer -= 1
        chosen.append(sizes[end - 1])
        end = cuts[layer][end]
        layer = max(layer - 1, 0)
    return tuple(sorted(chosen))
