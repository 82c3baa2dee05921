"""What comes in at /v1/responses, checked field by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from graphrunner.core.sampling_params import MAX_LOGPROBS
from graphrunner.entrypoints.openai.errors import bad_request, unsupported
from graphrunner.entrypoints.openai.protocol import (
    INT32_LIMIT,
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    FunctionName,
    JsonObject,
    RefusalPart,
    Refused,
    StreamOptions,
    Tolerated,
)

LOGPROBS_INCLUDED = "message.output_text.logprobs"
MAX_METADATA_PAIRS = 16
_Status = Literal["in_progress", "completed", "incomplete"] | None


class ItemText(Body):
    """A piece of text: of a user, or of an earlier reply that is sent back whole."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Tolerated = None
    logprobs: Tolerated = None


class MessageItem(Body):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ItemText | RefusalPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: _Status = None
    phase: Tolerated = None


class FunctionCallItem(Body):
    """A call that an earlier reply made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status = None


class FunctionOutputItem(Body):
    """What the called function gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ItemText]
    id: str | None = None
    status: _Status = None


class ReasoningPart(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    """Reasoning of an earlier reply; it goes with the message or call behind it."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None
    encrypted_content: None = None
    status: _Status = None


def _item_kind(item: object) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    return f"item:{kind}"  # no field has a colon in it, so that errors do not show this word


InputItem = Annotated[
    Annotated[MessageItem, Tag("item:message")]
    | Annotated[FunctionCallItem, Tag("item:function_call")]
    | Annotated[FunctionOutputItem, Tag("item:function_call_output")]
    | Annotated[ReasoningItem, Tag("item:reasoning")],
    Discriminator(
        _item_kind,
        custom_error_type="invalid_value",
        custom_error_message="the type must be message, function_call, function_call_output or reasoning",
    ),
]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Refused = None


class FunctionTool(Body):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    type: Literal["function"]
    name: FunctionName


class ReasoningConfig(Body):
    effort: Refused = None
    summary: Refused = None
    generate_summary: Refused = None


class ResponsesBody(Body):
    """/v1/responses."""

    input: str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    include: list[str] | None = None
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA_PAIRS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["disabled", "auto"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = Field(default=None, ge=1)
    prompt_cache_options: Tolerated = None
    prompt_cache_retention: Tolerated = None
    reasoning: ReasoningConfig | None = None
    access_programs: Refused = None
    background: Annotated[bool | None, WithJsonSchema({"const": False})] = None
    background_options: Refused = None
    context_management: Refused = None
    conversation: Refused = None
    image: Refused = None
    moderation: Refused = None
    prompt: Refused = None
    service_tier: Refused = None
    # Beyond OpenAI, in the names of SamplingParams.
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    priority: int = Field(default=0, ge=-INT32_LIMIT, lt=INT32_LIMIT)

    def check(self) -> None:
        """Rules that join several fields, and documented fields without effect here. Raises ApiError naming one."""
        for name, allowed in _ALLOWED.items():
            value = _at(self, name)
            if value is not None and value not in allowed:
                raise unsupported(name)
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options", "only allowed when stream is true")
        for name in self.include or ():
            if name != LOGPROBS_INCLUDED:
                raise bad_request("include", f"only {LOGPROBS_INCLUDED} can be had from this server", "invalid_value")
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise bad_request("top_logprobs", f"only allowed with {LOGPROBS_INCLUDED} in include")
        wanted = self.text.format if self.text else None
        if wanted is not None and wanted.type == "json_schema" and (wanted.schema_ is None or not wanted.name):
            missing = "schema" if wanted.schema_ is None else "name"
            raise bad_request(f"text.format.{missing}", "is required for the type json_schema")
        if not self.input:
            raise bad_request("input", "must not be empty", "invalid_value")
        for index, item in enumerate(self.input):
            if isinstance(item, MessageItem) and not item.content:
                raise bad_request(f"input[{index}].content", "must not be empty", "invalid_value")

    @property
    def wants_logprobs(self) -> bool:
        """Whether output text comes with logprobs."""
        return LOGPROBS_INCLUDED in (self.include or ())


_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
    "text.verbosity": ("medium",),
    "reasoning.effort": ("none",),
    "reasoning.summary": (),
    "reasoning.generate_summary": (),
    "stream_options.include_obfuscation": (False,),
    "stream_options.include_usage": (),
}
"""Documented fields that have no effect to give, with the values that ask for none."""


def _at(body: ResponsesBody, name: str) -> Any:
    """The value of a dotted name; None where a part of it is missing."""
    value: Any = body
    for part in name.split("."):
        value = None if value is None else getattr(value, part)
    return value
