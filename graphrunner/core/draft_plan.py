"""What the scheduler asks of speculation before each decode step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from graphrunner.core.request import Request


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Drafts to verify in one step, by decode row.

    Attributes:
        query_width: tokens a row computes: its last one and room for the drafts; one of the recorded widths.
        num_drafts: per row, at most query_width - 1; 0 for rows that do not speculate.
        token_ids: per row, the drafts; empty when only the device knows them.
        is_branching: the drafts are a tree. Requests whose tokens depend on earlier ones in other ways than through the
            model (penalties, logprobs) cannot verify one, nor can those beside them.
    """

    query_width: int
    num_drafts: tuple[int, ...]
    token_ids: tuple[Sequence[int], ...] = ()
    is_branching: bool = False


class DraftPlanner(Protocol):
    """Decides how many drafts each row verifies.

    Attributes:
        num_lookahead: positions, from a row's newest token on, at which a proposer writes KV of its own.
    """

    num_lookahead: int

    def plan(self, requests: Sequence[Request], num_useful: Sequence[int]) -> DraftPlan | None:
        """The next step's drafts; None when no row has any worth verifying.

        Args:
            requests: the decode rows, all tokens known.
            num_useful: per row, drafts past which its limits leave no room.
        """
        ...

    def filled_len(self, request: Request) -> int:
        """Of a running request, how many tokens from the first on a proposer's own KV holds without a hole; all that
        have KV, where it has none of its own."""
        ...
