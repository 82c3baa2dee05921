"""Prompt lookup against the obvious search."""

from hypothesis import given, settings
from hypothesis import strategies as st

from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.scheduled_batch import RowInit
from graphrunner.speculative.ngram import NgramIndex, NgramProposer
from graphrunner.speculative.proposer import DraftSequence


def obvious(tokens: list[int], low: int, high: int, count: int) -> list[int]:
    """Look at every place, longest repeat first, latest first."""
    for length in range(high, low - 1, -1):
        suffix = tokens[len(tokens) - length :]
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(suffix) == length and tokens[end - length : end] == suffix:
                found = list(tokens[end:])
                while len(found) < count:
                    found.append(found[len(found) - (len(tokens) - end)])
                return found[:count]
    return []


@settings(deadline=None, max_examples=400)
@given(
    tokens=st.one_of(st.lists(st.integers(0, size), max_size=16) for size in (1, 3)),
    cuts=st.lists(st.integers(0, 16), max_size=3),
    low=st.integers(1, 3),
    more=st.integers(0, 4),
    count=st.integers(1, 6),
)
def test_finds_what_the_obvious_search_finds(tokens, cuts, low, more, count) -> None:
    index = NgramIndex(low, low + more)
    start = 0
    for cut in [*sorted(cuts), len(tokens)]:
        index.extend(tokens[start : max(start, cut)])
        start = max(start, cut)
    assert index.continuation(count) == obvious(tokens, low, low + more, count)


def test_rows_are_their_own_and_new_owners_start_afresh() -> None:
    proposer = NgramProposer(2, 4)
    a = DraftSequence(1, (5, 6, 7, 5, 6), [], 2)
    b = DraftSequence(2, (1, 2, 3, 4), [], 2)
    assert proposer.propose([a, b]) == [[7, 5], []]
    grown = DraftSequence(2, (1, 2, 3, 4), [1, 2], 2)
    assert proposer.propose([grown]) == [[3, 4]]
    proposer.take_rows([RowInit(1, "x", SamplingParams(), 0, (9, 9, 8, 9, 9), (), ())])
    assert proposer.propose([DraftSequence(1, (9, 9, 8, 9, 9), [], 3)]) == [[8, 9, 9]]
