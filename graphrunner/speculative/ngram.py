"""Prompt lookup: what followed the last tokens the last time they stood in the same sequence.

Each row keeps a hash table from n-grams of `prompt_lookup_min` tokens to the place after their last occurrence, and
from each place to the one before it. A round files the new tokens and compares a few candidates, latest first, up to
`prompt_lookup_max` tokens back: its cost does not depend on the length of the sequence.

Source: the idea is "prompt lookup decoding" by A. Saxena (github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence

from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.scheduled_batch import RowInit
from graphrunner.speculative.proposer import DraftSequence, HostProposer, Target

_MAX_CANDIDATES = 16


def create_proposer(config: SpeculativeConfig, target: Target) -> HostProposer:
    """See `registry.PROPOSERS`. Needs nothing of the target."""
    return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)


class NgramProposer(HostProposer):
    """Args: fewest and most tokens that must repeat."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._sizes = (min_tokens, max_tokens)
        self._indices: dict[int, NgramIndex] = {}

    def take_rows(self, row_inits: Sequence[RowInit]) -> None:
        """See `Proposer.take_rows`."""
        for init in row_inits:
            self._indices.pop(init.row, None)

    def propose(self, sequences: Sequence[DraftSequence]) -> list[Sequence[int]]:
        """See `HostProposer.propose`."""
        return [self._propose_one(sequence) for sequence in sequences]

    def _propose_one(self, sequence: DraftSequence) -> Sequence[int]:
        index = self._indices.get(sequence.row)
        if index is None:
            index = self._indices[sequence.row] = NgramIndex(*self._sizes)
            index.extend(sequence.prompt_token_ids)
        num_known = len(index.tokens) - len(sequence.prompt_token_ids)
        index.extend(sequence.output_token_ids[num_known:])
        return index.continuation(sequence.num_drafts)


class NgramIndex:
    """Where the shortest n-grams of one sequence stand; longer repeats are found from there.

    Args:
        min_tokens, max_tokens: see `NgramProposer`.

    Attributes:
        tokens: the sequence so far.
    """

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self.tokens: list[int] = []
        self._min, self._max = min_tokens, max_tokens
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> the place after its last occurrence
        self._earlier: list[int] = []  # by place, the one before it of the same n-gram; -1 for none

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens. An n-gram is filed once the token after it is known, so a lookup never finds its own end."""
        tokens, size = self.tokens, self._min
        for token_id in token_ids:
            end = len(tokens)
            earlier = -1
            if end >= size:
                key = tuple(tokens[end - size :])
                earlier = self._last.get(key, -1)
                self._last[key] = end
            self._earlier.append(earlier)
            tokens.append(token_id)

    def continuation(self, num_tokens: int) -> list[int]:
        """Up to `num_tokens` tokens that followed the longest suffix seen before; empty when none was."""
        tokens, end = self.tokens, len(self.tokens)
        place = self._last.get(tuple(tokens[end - self._min :]), -1) if end >= self._min else -1
        best, best_len = -1, self._min - 1
        for _ in range(_MAX_CANDIDATES):
            if place < 0 or best_len >= self._max:
                break
            # Only a longer repeat than the best is of use: the token that would make it longer is looked at first.
            if place > best_len and tokens[place - best_len - 1] == tokens[end - best_len - 1]:
                length = self._repeat_len(place)
                if length > best_len:
                    best, best_len = place, length
            place = self._earlier[place]
        return self._read(best, num_tokens) if best >= 0 else []

    def _repeat_len(self, place: int) -> int:
        """How many tokens before `place` equal the last ones, up to the most that are compared."""
        tokens, end, length = self.tokens, len(self.tokens), self._min
        while length < self._max and length < place and tokens[place - length - 1] == tokens[end - length - 1]:
            length += 1
        return length

    def _read(self, start: int, num_tokens: int) -> list[int]:
        """Tokens from `start` on; past the end the repeat is taken to go on with its own period."""
        found = self.tokens[start : start + num_tokens]
        period = len(self.tokens) - start
        while len(found) < num_tokens:
            found.append(found[len(found) - period])
        return found
