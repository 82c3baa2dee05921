"""Good bodies made bad in one to three places get a 400 that names the field, or a good answer; never a 500."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from loopback import RunningServer, start_server
from scripted_engine import FakeEngine

TOOL = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/responses",
        {
            "input": "hi",
            "max_output_tokens": 5,
            "temperature": 0.5,
            "metadata": {"a": "b"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
            "tools": [TOOL],
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "reasoning": {"effort": None},
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "y"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "z", "annotations": []}]},
            ],
            "stream": True,
        },
    ),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64", "pooling": "mean", "priority": 0}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_tokens": 3,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 1,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "stream": True,
        },
    ),
    (
        "/v1/completions",
        {"prompt": [[1, 2], [3]], "max_tokens": 2, "logprobs": 1, "stop": ["x"], "logit_bias": {"5": 1}},
    ),
)
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 2**31, 2**63, 2**70, 1e308, -0.5, "", "x", "\x00", "\u0085", [], {}, [[]], [{}],
    [None], ["x"], [1], {"a": 1}, {"type": "x"}, {"type": None}, {"type": {}}, [{"type": []}], {"$ref": "#"},
    {"$ref": "#/a"}, "auto", "required", {"type": "function"}, "a" * 5000,
)  # fmt: skip
EXTRA = ("zz", "type", "stop", "n", "dimensions", "background", "status", "enum", "items", "anyOf")


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    def build() -> FakeEngine:
        engine = FakeEngine()
        engine.max_model_len = 512
        return engine

    server = start_server(build)
    yield server
    server.stop()


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be changed."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def mutated(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = rng.choice(list(places(body)) or [()])
        parent: Any = body
        for key in path[:-1]:
            parent = parent[key]
        action = rng.random()
        if action < 0.6 and path:
            parent[path[-1]] = copy.deepcopy(rng.choice(ODD))
        elif action < 0.75 and path:
            del parent[path[-1]]
        elif isinstance(parent, dict):
            parent[rng.choice(EXTRA)] = copy.deepcopy(rng.choice(ODD))
        else:
            parent.append(copy.deepcopy(rng.choice(ODD)))
    return body


def check(http: httpx.Client, seed: int) -> int:
    rng = random.Random(seed)
    path, body = rng.choice(BODIES)
    sent = json.dumps(mutated(body, rng))
    answer = http.post(path, content=sent, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), (seed, sent, answer.text)
    if answer.status_code != httpx.codes.OK:
        error = answer.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error" and error["param"], (seed, sent, error)
        assert "\n" not in error["message"] and len(error["message"]) < 2000, (seed, error)
    else:
        assert '"error":{' not in answer.text and "response.failed" not in answer.text, (seed, sent, answer.text)
    return answer.status_code


def test_mutated_bodies(http: httpx.Client) -> None:
    statuses = [check(http, seed) for seed in range(700)]
    assert statuses.count(200) > 30 and statuses.count(400) > 300


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_mutated_bodies(http: httpx.Client) -> None:
    for seed in range(1_000, 21_000):
        check(http, seed)
