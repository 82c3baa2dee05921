"""/v1/responses through the real client: every event parses, and the stream tells the same as the whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from loopback import RunningServer, start_server
from openai.types.responses import Response
from scripted_engine import FakeEngine

from graphrunner.entrypoints.openai.server_options import ServerOptions

MODEL = "fake-model"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALLS = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    """One server for the file, whose context holds whole tool calls."""

    def build() -> FakeEngine:
        engine = FakeEngine()
        engine.max_model_len = 256
        return engine

    server = start_server(build)
    yield server
    server.stop()


@pytest.fixture
def said(server: RunningServer) -> Iterator[FakeEngine]:
    """The engine, to be given a script; it says hello again afterwards."""
    yield server.engine
    server.engine.script = "Hello, world!"


def events_of(client: openai.OpenAI, **given: Any) -> list[Any]:
    with client.responses.create(model=MODEL, stream=True, **given) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:  # what the client did not understand it keeps as extra fields
        assert type(event).__name__ != "BaseModel" and event.type, event
    return events


def test_whole(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="hi", instructions="be kind", metadata={"a": "b"}, user="me")
    assert isinstance(response, Response) and response.output_text == "Hello, world!"
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert response.instructions == "be kind" and response.metadata == {"a": "b"} and response.user == "me"
    assert response.output[0].type == "message" and response.output[0].status == "completed"
    usage = response.usage
    assert usage is not None and (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (10, 14, 24)
    assert usage.input_tokens_details.cached_tokens == 9 and usage.output_tokens_details.reasoning_tokens == 0
    assert response.parallel_tool_calls and response.tool_choice == "auto" and response.tools == []
    assert response.temperature == 1.0 and response.text is not None and response.text.format.type == "text"


def test_stream_says_what_the_whole_says(client: openai.OpenAI) -> None:
    events = events_of(client, input=[{"role": "user", "content": "hi"}])
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[4:-4] == ["response.output_text.delta"] * len(kinds[4:-4]) and len(kinds) > 12
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    assert text == events[-4].text == events[-3].part.text == last.output_text == "Hello, world!"
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert events[2].item.status == "in_progress" and events[2].item.content == []
    assert events[-2].item == last.output[0] and last.usage.output_tokens == 14
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.output[0].id}


def test_stream_helper_of_the_client(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="hi") as stream:
        final = stream.get_final_response()
    assert final.output_text == "Hello, world!"


def test_frames(http: httpx.Client) -> None:
    raw = http.post("/v1/responses", json={"input": "hi", "stream": True, "max_output_tokens": 2})
    assert raw.headers["content-type"].startswith("text/event-stream") and raw.text.endswith("\n\n")
    frames = raw.text.removesuffix("\n\n").split("\n\n")
    for frame in frames:
        first, second = frame.split("\n")
        assert first == f"event: {json.loads(second.removeprefix('data: '))['type']}"
    assert "[DONE]" not in raw.text and frames[-1].startswith("event: response.incomplete\n")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_cut_off(client: openai.OpenAI, is_streamed: bool) -> None:
    given: dict[str, Any] = {"input": "hi", "max_output_tokens": 3}
    if is_streamed:
        response = events_of(client, **given)[-1].response
    else:
        response = client.responses.create(model=MODEL, **given)
    assert response.output_text == "Hel" and response.status == response.output[0].status == "incomplete"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"


def test_sampling_fields(client: openai.OpenAI, server: RunningServer) -> None:
    extra = {"seed": 3, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "priority": -2, "stop": ["w"]}
    response = client.responses.create(model=MODEL, input="hi", temperature=0.5, top_p=0.9, extra_body=extra)
    params = server.engine.params[-1]
    assert (params.temperature, params.top_p, params.seed, params.top_k, params.min_p) == (0.5, 0.9, 3, 5, 0.1)
    assert params.repetition_penalty == 1.1 and server.engine.priorities[-1] == -2
    assert response.output_text == "Hello, " and (response.temperature, response.top_p) == (0.5, 0.9)


def test_structured_output(client: openai.OpenAI, server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted: Any = {"format": {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}}
    response = client.responses.create(model=MODEL, input="hi", text=wanted)
    shape = server.engine.params[-1].structured_output
    assert shape is not None and json.loads(shape.json_schema or "") == schema
    assert response.text is not None and response.text.format.model_dump(by_alias=True)["schema"] == schema
    client.responses.create(model=MODEL, input="hi", text={"format": {"type": "json_object"}})
    shape = server.engine.params[-1].structured_output
    assert shape is not None and json.loads(shape.json_schema or "") == {"type": "object"}


def test_logprobs(client: openai.OpenAI) -> None:
    given: Any = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(model=MODEL, **given).output[0].content[0]
    assert "".join(entry.token for entry in whole.logprobs) == "Hello, world!"
    assert [len(entry.top_logprobs) for entry in whole.logprobs] == [2] * 13
    events = events_of(client, **given)
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.logprobs]


def test_function_call(client: openai.OpenAI, said: FakeEngine) -> None:
    said.script = f"So {CALLS}"
    tools: Any = [WEATHER]
    response = client.responses.create(model=MODEL, input="hi", tools=tools)
    assert [item.type for item in response.output] == ["message", "function_call"]
    call = response.output[1]
    assert (
        call.name == "weather" and json.loads(call.arguments) == {"city": "Rome"} and call.call_id.startswith("call_")
    )
    assert response.output_text == "So " and response.tools[0].name == "weather"
    events = events_of(client, input="hi", tools=tools)
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    added = [event for event in events if event.type == "response.output_item.added"]
    assert deltas == done.arguments == call.arguments and done.name == "weather"
    assert [event.output_index for event in added] == [0, 1] and added[1].item.arguments == ""
    assert [item.type for item in events[-1].response.output] == ["message", "function_call"]


def test_forced_call(client: openai.OpenAI, said: FakeEngine) -> None:
    said.script = '{"city": "Rome"}'
    tools: Any = [WEATHER]
    response = client.responses.create(
        model=MODEL, input="hi", tools=tools, tool_choice={"type": "function", "name": "weather"}
    )
    assert [item.type for item in response.output] == ["function_call"]
    shape = said.params[-1].structured_output
    assert shape is not None and json.loads(shape.json_schema or "") == WEATHER["parameters"]
    assert response.tool_choice.name == "weather"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_reasoning(client: openai.OpenAI, said: FakeEngine, is_streamed: bool) -> None:
    said.script = "<think>Hm, well</think>Yes"
    if is_streamed:
        events = events_of(client, input="hi")
        text = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        assert text == "Hm, well"
        response = events[-1].response
    else:
        response = client.responses.create(model=MODEL, input="hi")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "Hm, well" and response.output_text == "Yes"
    assert 8 <= response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


def test_a_conversation_by_id(client: openai.OpenAI, server: RunningServer) -> None:
    """The next request sees what was said before, without the instructions of then; a copy can be had and forgotten."""
    first = client.responses.create(model=MODEL, input="abc", instructions="X")
    second = client.responses.create(model=MODEL, input="def", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage is not None and second.usage.input_tokens == 1 + len("abcHello, world!def")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(first.id)
    unstored = client.responses.create(model=MODEL, input="abc", store=False)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="def", previous_response_id=unstored.id)
    assert refused.value.body["param"] == "previous_response_id"


def test_store_is_bounded() -> None:
    server = start_server(FakeEngine, ServerOptions(port=0, max_response_store_mib=0))
    try:
        response = server.openai().responses.create(model=MODEL, input="hi")
        with pytest.raises(openai.NotFoundError):
            server.openai().responses.retrieve(response.id)
    finally:
        server.stop()


def test_items_sent_back(client: openai.OpenAI, said: FakeEngine) -> None:
    """What a reply holds can be the next request's input as it came, calls and their results included."""
    said.script = f"<think>Hm</think>{CALLS}"
    tools: Any = [WEATHER]
    response = client.responses.create(model=MODEL, input="hi", tools=tools)
    said.script = "Hello, world!"
    call = response.output[1]
    conversation: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *(item.model_dump(exclude_none=True) for item in response.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    answer = client.responses.create(model=MODEL, input=conversation, tools=tools)
    assert answer.output_text == "Hello, world!"
    assert answer.usage is not None and answer.usage.input_tokens == 1 + len("hisunny")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "user", "content": ""}]}, "input[0].content"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}}, "text.format.schema"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 200.0}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{**WEATHER, "parameters": {"type": 3}}]}, "tools[0].parameters"),
        ({"tools": [{**WEATHER, "parameters": {"type": {}}}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"n": 2}, "n"),
        ({"input": "x" * 300}, "input"),
        ({"input": "no template"}, "input"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
def test_refused_by_name(http: httpx.Client, given: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/responses", json={"input": "hi"} | given)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, answer.text
    assert param.rpartition(".")[2].partition("[")[0] in error["message"] and "secret" not in answer.text


def test_a_stream_that_breaks() -> None:
    """The engine dies in the middle: the stream ends with response.failed, which holds what was said so far."""
    server = start_server(FakeEngine)
    try:
        with server.openai().responses.create(model=MODEL, input="slow", stream=True) as stream:
            events = []
            for event in stream:
                events.append(event)
                if event.type == "response.output_text.delta":
                    server.engine.break_next_step = True
        last = events[-1]
        assert last.type == "response.failed" and last.response.status == "failed"
        assert last.response.error.code == "server_error" and "secret" not in last.response.error.message
        assert last.response.output[0].content[0].text.startswith("H")
    finally:
        server.stop()
