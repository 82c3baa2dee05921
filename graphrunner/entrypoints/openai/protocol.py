"""What comes in: the request bodies, checked field by field. A field that is not listed here is refused by name.

Fields of OpenAI's that this server cannot honour have the type `Refused`; those that change nothing here are accepted
with any value (`Tolerated`). Bounds that the Python API shares are checked where `SamplingParams` is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from graphrunner.core.sampling_params import MAX_LOGPROBS, MAX_N
from graphrunner.entrypoints.openai.errors import bad_request, unsupported

INT32_LIMIT = 1 << 31
MAX_TOOLS = 128
MAX_LOGIT_BIAS = 4096
MAX_MESSAGES = 4096
"""Checking and rendering one takes microseconds, in which no stream goes on: a full body of them would take seconds."""
_ids = {"type": "array", "items": {"type": "integer"}}
_prompt_schema = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _ids,
        {"type": "array", "items": _ids},
    ]
}
PromptField = Annotated[Any, WithJsonSchema(_prompt_schema)]
"""Text, token ids, or a list of either; `prompts.py` takes it apart."""
Tolerated = Annotated[Any, WithJsonSchema({"description": "accepted and without effect"})]
Refused = Annotated[Any, WithJsonSchema({"type": "null", "description": "not supported by this server"})]
JsonObject = dict[str, Any]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Body(BaseModel):
    """Base of everything that comes in."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """A piece of an earlier reply of another server."""

    type: Literal["refusal"]
    refusal: str


class ToolCallFunction(Body):
    name: str
    arguments: str


class MessageToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: ToolCallFunction


class Message(Body):
    """One turn. `content` may be empty only beside tool calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    # A reply of another server may be sent back whole; these are null in a text reply.
    audio: None = None
    function_call: None = None
    annotations: Tolerated = None


class FunctionDefinition(Body):
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: FunctionName


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchemaFormat(Body):
    name: str
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class GenerationBody(Body):
    """Fields that both kinds of completion have."""

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    user: Tolerated = None
    metadata: Tolerated = None
    store: Tolerated = None
    # Beyond OpenAI, in the names of SamplingParams.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    priority: int = Field(default=0, ge=-INT32_LIMIT, lt=INT32_LIMIT)

    def check(self) -> None:
        """Rules that join several fields. Raises ApiError naming one of them."""
        if self.stream_options is not None:
            if not self.stream:
                raise bad_request("stream_options", "only allowed when stream is true")
            if self.stream_options.include_obfuscation:
                raise unsupported("stream_options.include_obfuscation")
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_schema" and wanted.json_schema is None:
            raise bad_request("response_format.json_schema", "is required for the type json_schema")

    @property
    def is_usage_streamed(self) -> bool:
        """Whether the stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(GenerationBody):
    """/v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: int | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: Tolerated = None
    prompt_cache_key: Tolerated = None
    prompt_cache_options: Tolerated = None
    prompt_cache_retention: Tolerated = None
    service_tier: Refused = None
    modalities: Refused = None
    audio: Refused = None
    prediction: Refused = None
    reasoning_effort: Refused = None
    verbosity: Refused = None
    web_search_options: Refused = None
    functions: Refused = None
    function_call: Refused = None
    moderation: Refused = None

    def check(self) -> None:
        super().check()
        for name, allowed in _REFUSED_IN_CHAT.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise unsupported(name)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs", "only allowed when logprobs is true")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise bad_request("max_completion_tokens", "max_tokens is given as well, with another value")
        self._check_tools()

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if self.tools == []:
            raise bad_request("tools", "must not be empty")
        if len(set(names)) < len(names):
            raise bad_request("tools", "two functions have the same name")
        if self.tool_choice not in (None, "none") and not names:
            raise bad_request("tool_choice", "only allowed when tools are given")
        if self.parallel_tool_calls is not None and not names:
            raise bad_request("parallel_tool_calls", "only allowed when tools are given")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise bad_request("tool_choice", "names a function that is not in tools")
        is_forced = self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)
        if is_forced and self.response_format is not None and self.response_format.type != "text":
            raise bad_request("response_format", "cannot be combined with a forced tool_choice")


class CompletionBody(GenerationBody):
    """/v1/completions."""

    prompt: PromptField
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
    suffix: Refused = None

    def check(self) -> None:
        super().check()
        if self.suffix not in (None, ""):
            raise unsupported("suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request("best_of", "only supported with the value of n", "unsupported_parameter")


class EmbeddingBody(Body):
    """/v1/embeddings. `pooling` is beyond OpenAI."""

    input: PromptField
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: Tolerated = None
    pooling: Literal["mean", "last"] = "mean"
    priority: int = Field(default=0, ge=-INT32_LIMIT, lt=INT32_LIMIT)


class TokenizeBody(Body):
    """/tokenize: text, or a conversation under the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    add_generation_prompt: bool = True


class DetokenizeBody(Body):
    """/detokenize."""

    model: str | None = None
    tokens: list[int]


class SleepBody(Body):
    """/sleep."""

    level: int = Field(default=1, ge=1, le=2)


class WakeBody(Body):
    """/wake."""


_REFUSED_IN_CHAT: Mapping[str, tuple[object, ...]] = {
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "functions": (),
    "function_call": (),
    "moderation": (),
}
"""Documented fields that have no effect to give, with the values that ask for none."""
