"""A toy proposer: guesses that the token which followed the last one most often in this request follows it again.

LLM(speculative_config={"method": "toy_proposer"})     with this folder on the Python path
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.scheduled_batch import RowInit
from graphrunner.speculative.proposer import DraftSequence, HostProposer, Target


def create_proposer(config: SpeculativeConfig, target: Target) -> HostProposer:
    """What the registry calls; a proposer with weights would load them here."""
    return ToyProposer()


class ToyProposer(HostProposer):
    """Counts pairs of tokens, row by row."""

    def __init__(self) -> None:
        self._followers: dict[int, defaultdict[int, Counter[int]]] = {}
        self._num_counted: dict[int, int] = {}

    def take_rows(self, row_inits: Sequence[RowInit]) -> None:
        """Someone new has these rows."""
        for init in row_inits:
            self._followers[init.row] = defaultdict(Counter)
            self._num_counted[init.row] = 0

    def propose(self, sequences: Sequence[DraftSequence]) -> list[Sequence[int]]:
        """Count what is new, then walk from follower to follower."""
        return [self._propose_one(sequence) for sequence in sequences]

    def _propose_one(self, sequence: DraftSequence) -> list[int]:
        tokens = [*sequence.prompt_token_ids, *sequence.output_token_ids]
        followers, start = self._followers[sequence.row], self._num_counted[sequence.row]
        for last, following in zip(tokens[start:], tokens[start + 1 :], strict=False):
            followers[last][following] += 1
        self._num_counted[sequence.row] = len(tokens) - 1
        drafts: list[int] = []
        last = tokens[-1]
        while len(drafts) < sequence.num_drafts and followers[last]:
            last = followers[last].most_common(1)[0][0]
            drafts.append(last)
        return drafts
