"""What goes out of /v1/responses, as OpenAI names it: the response, its items, and the events of a stream.

A field that is None is written as null: clients find every documented key.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from graphrunner.entrypoints.openai.responses import TokenLogprob

Status = str
"""in_progress, completed, incomplete or failed."""


class OutputText(Struct, tag="output_text"):
    text: str = ""
    annotations: list[str] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, tag="reasoning_text"):
    text: str = ""


class MessageItem(Struct, tag="message"):
    """The reply's text."""

    id: str
    status: Status
    content: list[OutputText]
    role: str = "assistant"


class FunctionCallItem(Struct, tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str = ""


class ReasoningItem(Struct, tag="reasoning"):
    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[str] = []


OutputItem = MessageItem | FunctionCallItem | ReasoningItem


class InputDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: str


class ReasoningSettings(Struct, frozen=True):
    effort: None = None
    summary: None = None


class TextFormat(Struct, omit_defaults=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, object] | None = None
    strict: bool | None = None


class TextSettings(Struct):
    format: TextFormat
    verbosity: str = "medium"


class ToolSettings(Struct):
    name: str
    description: str | None
    parameters: dict[str, object] | None
    strict: bool | None
    type: str = "function"


class ToolChoice(Struct):
    name: str
    type: str = "function"


class ResponseObject(Struct):
    """A response, from its beginning to its end; what was asked is repeated in it."""

    id: str
    created_at: int
    model: str
    status: Status
    output: list[OutputItem]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    temperature: float
    text: TextSettings
    tool_choice: str | ToolChoice
    tools: list[ToolSettings]
    top_logprobs: int
    top_p: float
    store: bool
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    max_tool_calls: int | None
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    reasoning: ReasoningSettings = ReasoningSettings()
    background: bool = False
    service_tier: str = "default"
    truncation: str = "disabled"
    object: str = "response"


class DeletedResponse(Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class ResponseEvent(Struct):
    """One event of a stream. Which fields are set depends on `type`; the others are left out."""

    type: str
    sequence_number: int = 0
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
