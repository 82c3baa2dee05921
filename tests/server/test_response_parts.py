"""The store of responses, and the builder of their items, alone."""

from __future__ import annotations

import pytest

from graphrunner.entrypoints.openai.protocol import Message
from graphrunner.entrypoints.openai.reply_parser import ReplyPart
from graphrunner.entrypoints.openai.response_store import MESSAGE_OVERHEAD_BYTES, ResponseStore, StoredResponse
from graphrunner.entrypoints.openai.responses_builder import ResponseBuilder
from graphrunner.entrypoints.openai.tool_calls import ToolDelta


def stored(num_bytes: int) -> StoredResponse:
    return StoredResponse(b"x" * num_bytes, [])


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(100)
    for name in "abc":
        store.put(name, stored(30))
    assert store.get("a") is not None
    store.put("d", stored(30))
    assert [name for name in "abcd" if store.get(name)] == ["a", "c", "d"] and len(store) == 3


def test_too_large_alone_is_not_kept_and_room_comes_back() -> None:
    store = ResponseStore(100)
    store.put("big", stored(101))
    assert store.get("big") is None and len(store) == 0
    store.put("a", stored(100))
    assert store.delete("a") and not store.delete("a")
    store.put("b", stored(100))
    assert store.get("b") is not None


def test_the_conversation_counts() -> None:
    conversation = [
        Message(role="user", content="x" * 500),
        Message(role="assistant", content="y", reasoning_content="z"),
    ]
    assert StoredResponse(b"12345", conversation).num_bytes == 5 + 2 * MESSAGE_OVERHEAD_BYTES + 502


def test_line_ends_between_calls_are_no_message() -> None:
    builder = ResponseBuilder()
    first, second = ToolDelta(0, "{}", "call_1", "f"), ToolDelta(1, "{}", "call_2", "g")
    for part in (ReplyPart(tool_deltas=(first,)), ReplyPart(content="\n"), ReplyPart(tool_deltas=(second,))):
        list(builder.feed(part, 1, []))
    list(builder.finish(is_complete=True))
    assert [(item.name, item.arguments) for item in builder.items] == [("f", "{}"), ("g", "{}")]  # type: ignore[union-attr]


@pytest.mark.parametrize(("is_complete", "status"), [(True, "completed"), (False, "incomplete")])
def test_only_what_was_open_is_cut(is_complete: bool, status: str) -> None:
    builder = ResponseBuilder()
    pieces = (
        ReplyPart(reasoning="hm"),
        ReplyPart(content="so"),
        ReplyPart(tool_deltas=(ToolDelta(0, '{"a', "c", "f"),)),
    )
    kinds = [event.type for part in pieces for event in builder.feed(part, 2, [])]
    kinds += [event.type for event in builder.finish(is_complete=is_complete)]
    assert [item.status for item in builder.items] == ["completed", "completed", status]
    assert builder.num_reasoning_tokens == 2 and kinds.count("response.output_item.done") == 3


def test_no_text_is_an_empty_message() -> None:
    builder = ResponseBuilder()
    events = list(builder.finish(is_complete=True))
    assert events[0].type == "response.output_item.added"
    assert [item.content[0].text for item in builder.items] == [""]  # type: ignore[union-attr]
