"""From a request body to `SamplingParams`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from graphrunner.core.sampling_params import SamplingParams, StructuredOutput
from graphrunner.entrypoints.openai.errors import bad_request
from graphrunner.entrypoints.openai.json_schema import check_schema
from graphrunner.entrypoints.openai.protocol import (
    MAX_LOGIT_BIAS,
    ChatBody,
    CompletionBody,
    FunctionDefinition,
    GenerationBody,
    NamedToolChoice,
    ResponseFormat,
    Tool,
)

DEFAULT_COMPLETION_TOKENS = 16
_SHARED = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
_ANY_OBJECT = {"type": "object"}


def chat_sampling(body: ChatBody) -> SamplingParams:
    """Sampling of a chat request; without a limit it may fill the context."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    shape = _forced_tool_shape(body) or _format_shape(body.response_format)
    return _sampling(body, max_tokens, logprobs=logprobs, structured_output=shape)


def completion_sampling(body: CompletionBody) -> SamplingParams:
    """Sampling of a text completion. With echo and max_tokens=0 one token is made, to be thrown away."""
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if is_score_only(body):
        max_tokens = 1
    prompt_logprobs = body.logprobs if body.echo else None
    shape = _format_shape(body.response_format)
    return _sampling(body, max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs, structured_output=shape)


def is_score_only(body: CompletionBody) -> bool:
    """Whether only the prompt's logprobs are wanted."""
    return bool(body.echo) and body.max_tokens == 0


def called_name(body: ChatBody) -> str | None:
    """The function that tool_choice names."""
    return body.tool_choice.function.name if isinstance(body.tool_choice, NamedToolChoice) else None


def _sampling(
    body: GenerationBody,
    max_tokens: int | None,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    structured_output: StructuredOutput | None,
) -> SamplingParams:
    given = {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(body.logit_bias),
        structured_output=structured_output,
        **given,
    )


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    if len(given) > MAX_LOGIT_BIAS:
        problem = f"holds {len(given)} tokens and at most {MAX_LOGIT_BIAS} are allowed"
        raise bad_request("logit_bias", problem, "invalid_value")
    for key in given:
        if not re.fullmatch(r"-?[0-9]{1,10}", key):
            raise bad_request("logit_bias", "every key must be a token id", "invalid_value")
    return {int(key): bias for key, bias in given.items()}


def _format_shape(wanted: ResponseFormat | None) -> StructuredOutput | None:
    if wanted is None or wanted.type == "text":
        return None
    schema = _ANY_OBJECT
    if wanted.json_schema is not None and wanted.type == "json_schema" and wanted.json_schema.schema_ is not None:
        schema = wanted.json_schema.schema_
        check_schema(schema, "response_format.json_schema.schema")
    return StructuredOutput(json_schema=_schema_text(schema, "response_format"))


def _forced_tool_shape(body: ChatBody) -> StructuredOutput | None:
    """A named function's arguments as they are; under "required" a list of {name, arguments}."""
    for index, tool in enumerate(body.tools or ()):
        if tool.function.parameters is not None:
            check_schema(tool.function.parameters, f"tools[{index}].function.parameters")
    name = called_name(body)
    if name is not None:
        function = next(tool.function for tool in body.tools or () if tool.function.name == name)
        return StructuredOutput(json_schema=_schema_text(_arguments_schema(function), "tools"))
    if body.tool_choice == "required":
        calls = {"type": "array", "minItems": 1, "items": {"anyOf": [_call_schema(tool) for tool in body.tools or ()]}}
        if body.parallel_tool_calls is False:
            calls["maxItems"] = 1
        return StructuredOutput(json_schema=_schema_text(calls, "tools"))
    return None


def _call_schema(tool: Tool) -> dict[str, object]:
    properties = {"name": {"const": tool.function.name}, "arguments": _arguments_schema(tool.function)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _arguments_schema(function: FunctionDefinition) -> Mapping[str, object]:
    return function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _schema_text(schema: Mapping[str, object], param: str) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except ValueError:
        raise bad_request(param, "the schema holds a number that JSON does not have", "invalid_value") from None
