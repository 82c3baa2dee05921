"""Text given out piece by piece is the text of the whole, for every split and every kind of vocabulary."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vocabularies import byte_level, opaque, sentencepiece

from graphrunner.tokenizer.detokenizer import IncrementalDetokenizer
from graphrunner.tokenizer.tokenizer import Tokenizer

VOCABULARIES = {"byte_level": byte_level(), "sentencepiece": sentencepiece()}
vocabulary = st.sampled_from(sorted(VOCABULARIES))


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int], **options: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    texts, start = [], 0
    for end in [*sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]:
        texts.append(detokenizer.append(ids[start:end]))
        start = end
    return [*texts, detokenizer.finish()]


@settings(max_examples=300, deadline=None)
@given(
    vocabulary,
    st.lists(st.integers(0, 400), max_size=40),
    st.lists(st.integers(0, 40)),
    st.fixed_dictionaries(
        {name: st.booleans() for name in ("skip_special_tokens", "spaces_between_special_tokens", "is_continuation")}
    ),
)
def test_any_ids_in_any_split(kind: str, raw: list[int], cuts: list[int], options: dict[str, bool]) -> None:
    tokenizer = VOCABULARIES[kind]
    ids = [one % tokenizer.vocab_size for one in raw]
    assert "".join(streamed(tokenizer, ids, cuts, **options)) == tokenizer.decode(ids, **options)


@settings(max_examples=200, deadline=None)
@given(vocabulary, st.text(max_size=30))
def test_text_comes_out_whole_and_never_broken(kind: str, text: str) -> None:
    tokenizer = VOCABULARIES[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = streamed(tokenizer, ids, list(range(len(ids))), skip_special_tokens=False, is_continuation=False)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(vocabulary, st.text(max_size=30), st.booleans())
def test_decode_is_that_of_the_tokenizers_library(kind: str, text: str, skip: bool) -> None:
    tokenizer = VOCABULARIES[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == tokenizer.decode_opaque(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=30))
def test_broken_bytes_read_as_in_the_tokenizers_library(raw: list[int]) -> None:
    tokenizer = VOCABULARIES["byte_level"]
    ids = [one % tokenizer.vocab_size for one in raw]
    assert tokenizer.decode(ids) == tokenizer.decode_opaque(ids, skip_special_tokens=False)


def test_a_character_waits_for_its_last_byte() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("\u00e9\U0001f642x", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.append([one]) for one in ids] == ["", "\u00e9", "", "", "", "\U0001f642", "x"]
    assert detokenizer.finish() == ""


def test_an_unfinished_character_is_told_at_the_end() -> None:
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.append(tokenizer.encode("\u00e9", add_special_tokens=False)[:1]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_id("<|end|>")
    assert end is not None
    ids = [*tokenizer.encode("a", add_special_tokens=False), end, end]
    shown = {
        (True, True): "a",
        (True, False): "a",
        (False, False): "a<|end|><|end|>",
        (False, True): "a<|end|> <|end|>",
    }
    for (skip, spaces), text in shown.items():
        parts = streamed(tokenizer, ids, [1, 2], skip_special_tokens=skip, spaces_between_special_tokens=spaces)
        assert "".join(parts) == text


def test_the_first_space_belongs_to_an_output_but_not_to_a_text() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("the sea", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the sea"
    assert tokenizer.decode(ids, is_continuation=True) == " the sea"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=30), st.lists(st.integers(0, 30)))
def test_a_vocabulary_without_a_byte_table(raw: list[int], cuts: list[int]) -> None:
    tokenizer = opaque()
    assert tokenizer.pieces is None
    ids = [one % tokenizer.vocab_size for one in raw]
    joined = "".join(streamed(tokenizer, ids, cuts))
    assert joined == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("make", [byte_level, opaque])
def test_cost_of_a_token_does_not_grow(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    ids = tokenizer.encode("the sea and the land " * 400, add_special_tokens=False)

    def seconds(count: int) -> float:
        detokenizer = IncrementalDetokenizer(tokenizer)
        start_s = time.process_time()
        for token_id in ids[:count]:
            detokenizer.append([token_id])
        return time.process_time() - start_s

    small, large = (min(seconds(n) for _ in range(3)) for n in (len(ids) // 8, len(ids)))
    assert large < 8 * 4 * small  # linear is 8, quadratic 64
