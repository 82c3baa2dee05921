"""The shape of a tree of drafts: which guesses are alternatives to each other, which follow which."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_TREE_NODES = 7
"""With the last token before them that is as many query tokens a request as the uniform attention kernel takes."""

SUREST, LEAST_SURE = -1e-3, -30.0
"""What the log of a guess's own chance counts for at most, so that it stands behind its parent, and at least."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Tokens of a verify step: token 0 is the row's last one, token i (from 1) the draft at node i.

    Args:
        parents: of nodes 1, 2, ...: the token that each follows. Level by level, siblings side by side.

    Attributes:
        depths: places after the last token, by token; 0 for token 0.
        num_levels: depth of the deepest node.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...] = field(init=False)
    num_levels: int = field(init=False)

    def __post_init__(self) -> None:
        depths = [0]
        for node, parent in enumerate(self.parents, start=1):
            assert 0 <= parent < node, f"node {node} follows token {parent}, which does not come before it"
            depths.append(depths[parent] + 1)
        assert depths == sorted(depths), f"nodes must stand level by level: depths {depths}"
        object.__setattr__(self, "depths", tuple(depths))
        object.__setattr__(self, "num_levels", depths[-1])

    @property
    def num_tokens(self) -> int:
        """Tokens of a verify step: the last one and every node."""
        return len(self.parents) + 1

    def sees(self) -> list[list[bool]]:
        """[token][other]: whether the other is the token itself or one that it follows."""
        rows = [[True] + [False] * len(self.parents)]
        for node, parent in enumerate(self.parents, start=1):
            rows.append([*rows[parent]])
            rows[node][node] = True
        return rows

    def level(self, depth: int) -> range:
        """The nodes of one depth."""
        nodes = [token for token, own in enumerate(self.depths) if own == depth]
        return range(nodes[0], nodes[-1] + 1)

    def children(self, token: int) -> list[int]:
        """Nodes that follow a token, likeliest first."""
        return [node for node, parent in enumerate(self.parents, start=1) if parent == token]


@dataclass(frozen=True, slots=True)
class TreeGrowth:
    """How far a tree may grow whose shape each round finds anew: its most promising guesses, by the draft's own word.

    Source: Li et al., EAGLE-2, 2024.

    Args:
        num_nodes: guesses that are verified.
        num_levels: places after the last token, at most.
        num_children: guesses that are considered after each guess.

    Attributes:
        num_beams: guesses of a level from which the draft goes on. With those of all levels they fit into one step of
            the draft, and their KV into the places of the nodes.
    """

    num_nodes: int
    num_levels: int
    num_children: int
    num_beams: int = field(init=False)

    def __post_init__(self) -> None:
        num_computed_levels = max(1, self.num_levels - 1)
        beams = max(1, min(self.num_children, self.num_nodes // num_computed_levels))
        object.__setattr__(self, "num_beams", beams)

    @property
    def num_tokens(self) -> int:
        """Tokens of a verify step: the last one and every node."""
        return self.num_nodes + 1

    @property
    def num_candidates(self) -> int:
        """Guesses among which the nodes are chosen."""
        return self.num_children * (1 + self.num_beams * (self.num_levels - 1))


def tree_from_paths(paths: str | Sequence[Sequence[int]]) -> DraftTree:
    """A tree given as vLLM's `speculative_token_tree`: each node as the ranks of the guesses that lead to it.

    "[(0,), (1,), (0, 0)]" is the two likeliest next tokens, and the likeliest one after the first of them.

    Raises:
        ValueError: not such a list; the message says why.
    """
    try:
        given = ast.literal_eval(paths) if isinstance(paths, str) else paths
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        given = None
    if not isinstance(given, list | tuple) or not given:
        raise ValueError("must be a list of paths, as [(0,), (1,), (0, 0)]")
    nodes = [tuple(path) if isinstance(path, list | tuple) else () for path in given]
    if any(not path or not all(type(rank) is int and rank >= 0 for rank in path) for path in nodes):
        raise ValueError("each path must hold ranks: whole numbers from 0")
    if len(set(nodes)) != len(nodes):
        raise ValueError("a path stands twice")
    ordered = sorted(nodes, key=lambda path: (len(path), path))
    places = {(): 0} | {path: index for index, path in enumerate(ordered, start=1)}
    for path in ordered:
        if path[:-1] not in places:
            raise ValueError(f"{path} has no parent {path[:-1]}")
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in places:
            raise ValueError(f"{path} leaves out rank {path[-1] - 1}")
    if len(nodes) > MAX_TREE_NODES:
        raise ValueError(f"it has {len(nodes)} nodes, at most {MAX_TREE_NODES} can be verified at once")
    return DraftTree(tuple(places[path[:-1]] for path in ordered))
