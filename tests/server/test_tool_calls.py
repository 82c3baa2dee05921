"""Tool calls and reasoning, whole and streamed, through the real client; and no matter how the text is cut."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import RunningServer

from graphrunner.entrypoints.openai.reply_parser import ReplyFormat
from graphrunner.entrypoints.openai.tool_calls import ToolFormat

MODEL = "fake-model"
HELLO: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
HERMES = (
    'Hi <tool_call>\n{"name": "f", "arguments": {"a": "}\\"{"}}\n</tool_call>\n'
    '<tool_call>{"arguments": {}, "name": "g"}</tool_call>'
)
LLAMA = '{"name": "f", "parameters": {"a": [1]}}; {"name": "g", "parameters": {}}'
REQUIRED = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'


@pytest.fixture
def scripted(server: RunningServer) -> Iterator[RunningServer]:
    """The server with room for long scripts; the script is put back."""
    script, limit = server.engine.script, server.engine.max_model_len
    server.engine.max_model_len = 4096
    yield server
    server.engine.script, server.engine.max_model_len = script, limit


def ask(server: RunningServer, script: str, *, stream: bool, **options: Any) -> tuple[str, list[tuple[str, Any]], str]:
    """(content, calls, finish reason) of one reply."""
    server.engine.script = script
    answer: Any = server.openai().chat.completions.create(model=MODEL, messages=HELLO, stream=stream, **options)
    if not stream:
        message = answer.choices[0].message
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
        assert len({call.id for call in message.tool_calls or ()}) == len(calls)
        return message.content or "", calls, answer.choices[0].finish_reason
    content, pieces, reason = "", {}, ""
    for chunk in answer:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            entry = pieces.setdefault(call.index, ["", ""])
            if call.id is not None:
                entry[0] = call.function.name
            entry[1] += call.function.arguments
        reason = choice.finish_reason or reason
    return content, [(name, json.loads(text)) for name, text in pieces.values()], reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "options", "content", "calls"),
    [
        (HERMES, {}, "Hi ", [("f", {"a": '}"{'}), ("g", {})]),
        (HERMES, {"parallel_tool_calls": False}, "Hi ", [("f", {"a": '}"{'})]),
        (LLAMA, {}, "", [("f", {"a": [1]}), ("g", {})]),
        (REQUIRED, {"tool_choice": "required"}, "", [("f", {"a": 1}), ("g", {})]),
        ('{"a": 1}', {"tool_choice": {"type": "function", "function": {"name": "g"}}}, "", [("g", {"a": 1})]),
        ("No call.", {}, "No call.", []),
        ('<tool_call>{"name": "zz"}</tool_call>', {}, '<tool_call>{"name": "zz"}</tool_call>', []),
        (LLAMA, {"tool_choice": "none"}, LLAMA, []),
    ],
)
def test_calls(
    scripted: RunningServer, script: str, options: dict[str, Any], content: str, calls: list[Any], *, stream: bool
) -> None:
    got = ask(scripted, script, stream=stream, tools=TOOLS, **options)
    assert got == (content, calls, "tool_calls" if calls else "stop")


def test_forced_choices_are_structured_output(scripted: RunningServer) -> None:
    ask(scripted, REQUIRED, stream=False, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    shape = scripted.engine.params[-1].structured_output
    assert shape is not None
    schema = json.loads(shape.json_schema or "")
    assert schema["maxItems"] == 1 and [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]] == [
        "f",
        "g",
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "prompt"), [("<think>\nhm</think>\n\nHi", "hi"), ("hm\n</think>\nHi", "hi<think>\n")]
)
def test_reasoning(scripted: RunningServer, script: str, prompt: str, stream: bool) -> None:
    scripted.engine.script = script
    messages: Any = [{"role": "user", "content": prompt}]
    answer: Any = scripted.openai().chat.completions.create(model=MODEL, messages=messages, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in answer]
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
    else:
        reasoning, content = answer.choices[0].message.reasoning_content, answer.choices[0].message.content
    assert (reasoning, content) == ("hm", "Hi")


AUTO = ReplyFormat(has_reasoning=True, tool_format=ToolFormat.AUTO, tool_names=("f", "g"))
LIST = ReplyFormat(tool_format=ToolFormat.LIST, tool_names=("f", "g"))
REPLIES = [
    (AUTO, "<think>\nhm</think>\n\n" + HERMES + " bye"),
    (AUTO, LLAMA),
    (AUTO, '<|python_tag|>{"name": "f", "parameters": {}}'),
    (AUTO, "a <tool_call>nope</tool_call> <b"),
    (AUTO, '{"x": 1} and more'),
    (AUTO, '<tool_call>{"name": "f", "arguments": {"a": '),
    (AUTO, "<"),
    (AUTO, "<think>unfinished"),
    (LIST, REQUIRED),
]


def parsed(reply_format: ReplyFormat, pieces: Sequence[str]) -> tuple[str, str, dict[int, tuple[str, str]]]:
    parser = reply_format.parser()
    reasoning = content = ""
    calls: dict[int, tuple[str, str]] = {}
    for index, piece in enumerate(pieces):
        part = parser.feed(piece, is_last=index == len(pieces) - 1)
        reasoning, content = reasoning + part.reasoning, content + part.content
        for delta in part.tool_deltas:
            name, arguments = calls.get(delta.index, ("", ""))
            calls[delta.index] = name + (delta.name or ""), arguments + delta.arguments
    return reasoning, content, calls


@given(reply=st.sampled_from(REPLIES), data=st.data())
@settings(max_examples=150, deadline=None)
def test_cuts_do_not_matter(reply: tuple[ReplyFormat, str], data: st.DataObject) -> None:
    reply_format, text = reply
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=len(text))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(reply_format, pieces) == parsed(reply_format, [text])


@given(text=st.text(alphabet='<>/{}[]",:; \n\\abf_tool_callthinkname', max_size=80))
@settings(max_examples=150, deadline=None)
def test_any_text_is_read_without_an_error(text: str) -> None:
    whole = parsed(AUTO, [text])
    assert parsed(AUTO, list(text) or [""]) == whole
