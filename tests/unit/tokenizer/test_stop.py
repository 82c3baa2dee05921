"""Stop strings are found on the text, whatever its pieces, and hold back no more than they must."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrunner.core.errors import InvalidRequestError
from graphrunner.tokenizer.stop import StopMatcher

letters = st.text(alphabet="ab", max_size=24)
stops_of = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def oracle(text: str, stops: list[str], is_included: bool) -> tuple[str, str | None]:
    """The first end of any stop string; of several ending there, the longest."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return (text[:end] if is_included else text[: end - len(stop)]), stop
    return text, None


def stream(matcher: StopMatcher, chunks: list[str]) -> tuple[list[str], str | None]:
    texts = []
    for chunk in chunks:
        result = matcher.append(chunk)
        texts.append(result.text)
        if result.stop is not None:
            assert matcher.append("ab" * 9).text == "" and matcher.finish() == ""
            return texts, result.stop
    return [*texts, matcher.finish()], None


def split(text: str, cuts: list[int]) -> list[str]:
    ends = [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@settings(max_examples=500, deadline=None)
@given(letters, stops_of, st.lists(st.integers(0, 24)), st.booleans())
def test_any_split_gives_what_the_whole_gives(text: str, stops: list[str], cuts: list[int], included: bool) -> None:
    texts, stop = stream(StopMatcher(stops, included), split(text, cuts))
    assert ("".join(texts), stop) == oracle(text, stops, included)


@settings(max_examples=300, deadline=None)
@given(letters, stops_of)
def test_what_is_held_back_is_exactly_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher, released = StopMatcher(stops), ""
    for i, character in enumerate(text):
        result = matcher.append(character)
        if result.stop is not None:
            return
        released += result.text
        seen = text[: i + 1]
        starts = [stop[:n] for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])]
        assert len(seen) - len(released) == max(map(len, starts), default=0)


def test_no_delay_without_a_reason() -> None:
    assert StopMatcher(["zzzzzzzz"]).append("Hello").text == "Hello"
    assert StopMatcher(["zzzzzzzz"]).append("Hel zz").text == "Hel "


def test_across_borders_and_near_misses() -> None:
    matcher = StopMatcher(["lo w"])
    assert stream(matcher, ["Hel", "lo", " ", "world"]) == (["He", "l", "", ""], "lo w")
    texts, stop = stream(StopMatcher(["ld!!"]), ["wor", "ld", "!", " end"])
    assert ("".join(texts), stop) == ("world! end", None)
    assert "".join(stream(StopMatcher(["ld!!"]), ["world!"])[0]) == "world!"
    assert stream(StopMatcher(["ld"], include_stop_str_in_output=True), ["wor", "ld and"]) == (["wor", "ld"], "ld")


def test_no_stop_strings_pass_everything() -> None:
    assert stream(StopMatcher([]), ["a", "", "b"]) == (["a", "", "b", ""], None)


@pytest.mark.parametrize("stops", [[""], ["a", ""], ["", ""]])
def test_an_empty_stop_is_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="stop="):
        StopMatcher(stops)


def test_a_long_stop_string_is_linear() -> None:
    start_s = time.process_time()
    matcher = StopMatcher(["a" * 20_000 + "b"])
    for _ in range(500):
        matcher.append("a" * 40)
    assert len(matcher.finish()) == 20_000
    assert time.process_time() - start_s < 5
