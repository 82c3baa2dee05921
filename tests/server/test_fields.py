"""Every documented field has an effect, or is refused by name (tests/server/test_refusals.py)."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import httpx
import openai
import pytest
from loopback import RunningServer

MODEL = "fake-model"
HELLO = [{"role": "user", "content": "hi"}]


def strict(answer: httpx.Response) -> Any:
    """JSON without NaN or Infinity."""
    assert answer.status_code == 200, answer.text

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(answer.text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("given", "text", "reason"),
    [
        ({"stop": "e"}, "H", "stop"),
        ({"stop": ["x", "l"]}, "He", "stop"),
        ({"stop": []}, "Hello, world!", "stop"),
        ({"stop": None}, "Hello, world!", "stop"),
        ({"logit_bias": {"90": 100}, "max_tokens": 3}, "ZZZ", "length"),
        ({"logit_bias": {}}, "Hello, world!", "stop"),
        ({"max_tokens": 1}, "H", "length"),
        ({"min_tokens": 15}, "Hello, world!He", "stop"),
        ({"ignore_eos": True, "max_tokens": 15}, "Hello, world!He", "length"),
        ({"stop_token_ids": [108]}, "He", "stop"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_fields_with_a_forced_outcome(
    client: openai.OpenAI, given: dict[str, Any], text: str, reason: str, is_stream: bool
) -> None:
    own = {key: given[key] for key in ("min_tokens", "ignore_eos", "stop_token_ids") if key in given}
    known = {"max_tokens": 20, **{key: value for key, value in given.items() if key not in own}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        stream=is_stream,
        extra_body=own,
        **known,  # type: ignore[call-overload]
    )
    if is_stream:
        chunks = [chunk.choices[0] for chunk in answer]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == text
        assert chunks[-1].finish_reason == reason
    else:
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, reason)


def test_sampling_fields_reach_the_engine(server: RunningServer, http: httpx.Client) -> None:
    given = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": 11, "presence_penalty": 1.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.25, "n": 2, "min_tokens": 1, "stop_token_ids": [5],
        "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    bodies = (
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": 2}),
    )
    for path, body in bodies:
        strict(
            http.post(path, json={**body, **given, "priority": -3, "user": "u", "metadata": {"a": "b"}, "store": True})
        )
        params = server.engine.params[-1]
        assert {name: getattr(params, name) for name in given} == {**given, "stop_token_ids": (5,)}
        assert params.max_tokens == 2 and server.engine.priorities[-1] == -3


def test_defaults(server: RunningServer, http: httpx.Client) -> None:
    strict(http.post("/v1/chat/completions", json={"messages": HELLO}))
    assert server.engine.params[-1].max_tokens is None and server.engine.params[-1].temperature == 1.0
    strict(http.post("/v1/completions", json={"prompt": "a"}))
    assert server.engine.params[-1].max_tokens == 16


def test_structured_output_reaches_the_engine(server: RunningServer, http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    formats: list[tuple[dict[str, Any], Any]] = [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}, schema),
        ({"type": "text"}, None),
    ]
    for wanted, expected in formats:
        strict(http.post("/v1/chat/completions", json={"messages": HELLO, "response_format": wanted}))
        shape = server.engine.params[-1].structured_output
        assert (None if shape is None else json.loads(shape.json_schema or "")) == expected


@pytest.mark.parametrize("given", [{"top_k": 1}, {"top_p": 0.01}])
@pytest.mark.parametrize("echo", [False, True])
def test_completion_logprobs_are_strict_json(http: httpx.Client, given: dict[str, Any], echo: bool) -> None:
    body = {"prompt": "abc", "logprobs": 5, "echo": echo, "max_tokens": 3, **given}
    choice = strict(http.post("/v1/completions", json=body))["choices"][0]
    assert choice["text"] == ("abc" if echo else "") + "Hel"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list(choice["text"]) and logprobs["text_offset"] == list(range(len(choice["text"])))
    assert logprobs["token_logprobs"] == ([None, 0.0, 0.0] if echo else []) + [0.0] * 3
    assert set(logprobs["top_logprobs"][-1].values()) == {0.0, -9999.0}
    raw = http.post("/v1/completions", json={**body, "stream": True}).text
    pieces = [json.loads(line[6:])["choices"][0]["logprobs"] for line in raw.splitlines() if line.startswith("data: {")]
    for name, values in logprobs.items():
        assert [value for piece in pieces if piece for value in piece[name]] == values


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=5, max_tokens=3)  # type: ignore[arg-type]
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert [entry.token for entry in content] == ["H", "e", "l"] and [len(entry.top_logprobs) for entry in content] == [
        5
    ] * 3
    assert content[0].bytes == [72] and all(
        math.isfinite(top.logprob) for entry in content for top in entry.top_logprobs
    )
    chunks = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, max_tokens=3, stream=True)  # type: ignore[arg-type]
    streamed = [
        entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content or []
    ]
    assert [entry.token for entry in streamed] == ["H", "e", "l"] and streamed[0].top_logprobs == []


def test_score_a_prompt(http: httpx.Client) -> None:
    """echo with max_tokens 0 gives the prompt's logprobs and no new token."""
    answer = strict(
        http.post("/v1/completions", json={"prompt": [97, 98], "echo": True, "logprobs": 1, "max_tokens": 0})
    )
    assert answer["choices"][0]["text"] == "ab" and answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, 0.0]
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_forms(http: httpx.Client) -> None:
    for prompt, count in (("ab", 1), ([97, 98], 1), (["ab", "c"], 2), ([[97], [98, 99]], 2)):
        choices = strict(http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}))["choices"]
        assert [choice["index"] for choice in choices] == list(range(count))


def test_conversation_forms(http: httpx.Client) -> None:
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "d"},
    ]  # fmt: skip
    answer = strict(http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}))
    assert answer["usage"]["prompt_tokens"] == len("abcd") + 1


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert "secret" not in http.get("/v1/models").text


def test_embeddings(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.embeddings.create(model=MODEL, input=["abcd", "abc"])
    assert answer.data[0].embedding == pytest.approx([0.8, 0.6]) and answer.usage.prompt_tokens == 7
    raw = strict(http.post("/v1/embeddings", json={"input": "abcd", "encoding_format": "base64"}))
    assert struct.unpack("<2f", base64.b64decode(raw["data"][0]["embedding"])) == pytest.approx((0.8, 0.6))
    last = strict(http.post("/v1/embeddings", json={"input": [97, 98, 99], "pooling": "last"}))
    assert last["data"][0]["embedding"] == pytest.approx([0.6, 0.8])


def test_embeddings_priority_and_failure(server: RunningServer, http: httpx.Client) -> None:
    strict(http.post("/v1/embeddings", json={"input": ["ab", "cd"], "priority": -3}))
    assert server.engine.priorities[-2:] == [-3, -3]
    answer = http.post("/v1/embeddings", json={"input": ["ab", "nothing"]})
    assert answer.status_code == 500 and "nothing" not in answer.text and answer.json()["error"]["type"]


def test_tokenize(http: httpx.Client) -> None:
    assert strict(http.post("/tokenize", json={"prompt": "hi"})) == {
        "count": 2,
        "max_model_len": 64,
        "tokens": [104, 105],
    }
    assert strict(http.post("/tokenize", json={"messages": HELLO}))["tokens"] == [257, 104, 105]
    assert strict(http.post("/detokenize", json={"tokens": [104, 105]})) == {"prompt": "hi"}


def test_metrics(http: httpx.Client) -> None:
    strict(http.post("/v1/completions", json={"prompt": "a"}))
    text = http.get("/metrics").text
    for name in ("graphrunner_steps_total", "graphrunner_http_requests_total", "graphrunner_http_generation_seconds"):
        assert name in text


def test_openapi_describes_the_bodies(http: httpx.Client) -> None:
    described = strict(http.get("/openapi.json"))
    schema = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in schema["properties"] and "$ref" not in json.dumps(schema)


def test_every_documented_field_is_known() -> None:
    """What the installed client can send is a field of our bodies: used, without effect, or refused by name."""
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.responses import response_create_params

    from graphrunner.entrypoints.openai.protocol import ChatBody, CompletionBody, EmbeddingBody
    from graphrunner.entrypoints.openai.responses_body import ResponsesBody

    for body, documented in (
        (ChatBody, chat_create_params.CompletionCreateParamsBase),
        (CompletionBody, completion_create_params.CompletionCreateParamsBase),
        (EmbeddingBody, embedding_create_params.EmbeddingCreateParams),
        (ResponsesBody, response_create_params.ResponseCreateParamsBase),
    ):
        assert set(documented.__annotations__) - set(body.model_fields) == set(), body


def test_a_refusal_sent_back(http: httpx.Client) -> None:
    turn = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    answer = strict(http.post("/v1/chat/completions", json={"messages": [*HELLO, turn, *HELLO]}))
    assert answer["usage"]["prompt_tokens"] == 1 + len("hinohi")
