"""Stream framing byte for byte, finish reasons, usage, and the same answer streamed and whole."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest
from loopback import RunningServer

HELLO = [{"role": "user", "content": "hi"}]


def raw_stream(http: httpx.Client, path: str, body: dict[str, object]) -> bytes:
    answer = http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache" and "content-length" not in answer.headers
    return answer.content


def events(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of each event; anything that is not `data: <one line>` and an empty line fails."""
    assert re.fullmatch(rb"(data: [^\n]+\n\n)+", raw), raw
    lines = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n")[:-1]]
    assert lines[-1] == b"[DONE]" and lines.count(b"[DONE]") == 1

    def no_constants(name: str) -> None:
        raise AssertionError(name)

    return [json.loads(line, parse_constant=no_constants) for line in lines[:-1]]


def test_bytes_of_a_completion_stream(http: httpx.Client) -> None:
    raw = raw_stream(http, "/v1/completions", {"prompt": "a", "max_tokens": 3}).decode()
    shape = (
        'data: {"id":"cmpl-ID","object":"text_completion","created":T,"model":"fake-model","choices":'
        '[{"index":0,"text":"TEXT","logprobs":null,"finish_reason":REASON}],"system_fingerprint":null}\n\n'
    )
    raw = re.sub(r'"created":\d+', '"created":T', re.sub(r"cmpl-[0-9a-f]{32}", "cmpl-ID", raw))
    pieces = [("H", "null"), ("e", "null"), ("l", '"length"')]
    expected = "".join(shape.replace("TEXT", text).replace("REASON", reason) for text, reason in pieces)
    assert raw == expected + "data: [DONE]\n\n"


def test_bytes_of_a_chat_stream(http: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "stream_options": {"include_usage": True}}
    raw = raw_stream(http, "/v1/chat/completions", body).decode()
    raw = re.sub(r'"created":\d+', '"created":T', re.sub(r"chatcmpl-[0-9a-f]{32}", "chatcmpl-ID", raw))
    head = 'data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":T,"model":"fake-model","choices":'
    usage = '{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}'
    choice = (
        '[{"index":0,"delta":DELTA,"logprobs":null,"finish_reason":REASON}],"usage":null,"system_fingerprint":null}'
    )
    deltas = [('{"role":"assistant","content":""}', "null"), ('{"content":"H"}', "null"), ("{}", '"length"')]
    expected = "".join(
        head + choice.replace("DELTA", delta).replace("REASON", reason) + "\n\n" for delta, reason in deltas
    )
    assert raw == expected + head + f'[],"usage":{usage},"system_fingerprint":null}}\n\n' + "data: [DONE]\n\n"


ENDINGS = [
    ({}, "stop", "Hello, world!"),
    ({"max_tokens": 3}, "length", "Hel"),
    ({"stop": "lo"}, "stop", "Hel"),
    ({"stop": ["zzzzzzzz"]}, "stop", "Hello, world!"),
    ({"n": 2}, "stop", "Hello, world!"),
    ({"n": 3, "max_tokens": 2}, "length", "He"),
]


@pytest.mark.parametrize(("given", "reason", "text"), ENDINGS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_one_reason_after_all_text(
    http: httpx.Client, path: str, given: dict[str, Any], reason: str, text: str
) -> None:
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": HELLO}
    body = {**prompt, "max_tokens": 30, **given}
    chunks = events(raw_stream(http, path, body))
    for index in range(given.get("n", 1)):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert all("finish_reason" in choice for choice in choices)
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [reason]
        assert "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices) == text
    whole = http.post(path, json=body).json()["choices"]
    assert [choice["finish_reason"] for choice in whole] == [reason] * given.get("n", 1)
    assert {choice.get("text") or choice["message"]["content"] for choice in whole} == {text}


def test_outputs_that_end_at_different_times_end_once(server: RunningServer, http: httpx.Client) -> None:
    """An output that ended is shown again while its sibling runs; the client must not see that."""
    server.engine.short_choices = {1}
    try:
        chunks = events(raw_stream(http, "/v1/completions", {"prompt": "a", "n": 2, "max_tokens": 5}))
    finally:
        server.engine.short_choices = set()
    for index, text in ((0, "Hello"), (1, "H")):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert sum(choice["finish_reason"] is not None for choice in choices) == 1
        assert "".join(choice["text"] for choice in choices) == text


def test_usage(client: openai.OpenAI) -> None:
    """7 prompt tokens, n=3, 4 tokens each."""
    chunks = list(
        client.completions.create(
            model="fake-model",
            prompt="seven77",
            n=3,
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    whole = client.completions.create(model="fake-model", prompt="seven77", n=3, max_tokens=4)
    for usage in (chunks[-1].usage, whole.usage):
        assert usage is not None and usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 12, 19)
        assert usage.prompt_tokens_details.cached_tokens == 6


def test_no_usage_unless_asked_for(http: httpx.Client) -> None:
    chunks = events(raw_stream(http, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}))
    assert not any("usage" in chunk for chunk in chunks)


def test_first_chunk_comes_with_the_first_token_despite_a_stop(http: httpx.Client) -> None:
    body = {"prompt": "slow", "stop": "zzzzzzzz", "max_tokens": 10, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        first = next(line for line in stream.iter_lines() if line)
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "H"


def test_batched_prompts_stream_with_their_own_indices(http: httpx.Client) -> None:
    body = {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 4, "echo": True}
    chunks = events(raw_stream(http, "/v1/completions", body))
    texts = [""] * 6
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["oneHell"] * 2 + ["twoHell"] * 2 + ["threeHell"] * 2
    whole = http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert whole["usage"]["prompt_tokens"] == 11 and whole["usage"]["completion_tokens"] == 24
