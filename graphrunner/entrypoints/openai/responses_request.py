"""The chat request that a response means.

A response is one chat completion in other words: `chat_body_of` says which. Errors about that chat request are given
back under the names that the client used (`client_error`).
"""

from __future__ import annotations

from collections.abc import Sequence

from graphrunner.core.errors import InvalidRequestError
from graphrunner.entrypoints.openai.errors import ApiError, api_error_from
from graphrunner.entrypoints.openai.protocol import (
    ChatBody,
    FunctionDefinition,
    JsonSchemaFormat,
    Message,
    MessageToolCall,
    NamedFunction,
    NamedToolChoice,
    RefusalPart,
    ResponseFormat,
    Tool,
    ToolCallFunction,
)
from graphrunner.entrypoints.openai.responses_body import (
    FunctionCallItem,
    FunctionChoice,
    FunctionOutputItem,
    FunctionTool,
    InputItem,
    ItemText,
    MessageItem,
    ReasoningItem,
    ResponsesBody,
    TextConfig,
)
from graphrunner.entrypoints.openai.responses_objects import FunctionCallItem as CallOut
from graphrunner.entrypoints.openai.responses_objects import MessageItem as MessageOut
from graphrunner.entrypoints.openai.responses_objects import OutputItem
from graphrunner.entrypoints.openai.responses_objects import ReasoningItem as ReasoningOut

_CLIENT_NAMES: tuple[tuple[str, str], ...] = (
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    (".function.parameters", ".parameters"),
    ("messages", "input"),
)


def messages_of(given: str | Sequence[InputItem]) -> list[Message]:
    """The conversation that the input adds, as chat messages."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    messages: list[Message] = []
    reasoning: str | None = None
    for item in given:
        match item:
            case ReasoningItem():
                reasoning = "".join(part.text for part in item.content or item.summary or ()) or None
            case MessageItem():
                turn = Message(role=item.role, content=_text_of(item.content))
                if item.role == "assistant":
                    turn.reasoning_content, reasoning = reasoning, None
                messages.append(turn)
            case FunctionCallItem():
                _add_call(messages, item, reasoning)
                reasoning = None
            case FunctionOutputItem():
                content = _text_of(item.output)
                messages.append(Message(role="tool", content=content, tool_call_id=item.call_id))
    return messages


def chat_body_of(body: ResponsesBody, earlier: Sequence[Message]) -> ChatBody:
    """The chat request behind a response.

    Args:
        earlier: the conversation that `previous_response_id` stands for.

    Raises:
        ApiError: names a field of `body`.
    """
    first = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    tools = [_tool(tool) for tool in body.tools or ()] or None
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        choice = NamedToolChoice(type="function", function=NamedFunction(name=choice.name))  # type: ignore[assignment]
    same = ("temperature", "top_p", "seed", "stop", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos")
    chat = ChatBody(
        messages=[*first, *earlier, *messages_of(body.input)],
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs or None,
        top_logprobs=body.top_logprobs,
        tools=tools,
        tool_choice=choice,  # type: ignore[arg-type]
        parallel_tool_calls=body.parallel_tool_calls if tools else None,
        response_format=_response_format(body.text),
        priority=body.priority,
        **{name: getattr(body, name) for name in same},
    )
    try:
        chat.check()
    except ApiError as error:
        raise client_error(error) from None
    return chat


def client_error(error: ApiError | InvalidRequestError) -> ApiError:
    """An error about the chat request, in the names of the response's fields."""
    known = api_error_from(error)
    param = known.body.param
    if param is None:
        return known
    renamed = param
    for chat_name, name in _CLIENT_NAMES:
        renamed = renamed.replace(chat_name, name)
    known.body.message = known.body.message.replace(param, renamed, 1)
    known.body.param = renamed
    return known


def _text_of(content: str | Sequence[ItemText | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _add_call(messages: list[Message], item: FunctionCallItem, reasoning: str | None) -> None:
    """Join a call to the assistant's turn that it belongs to: calls in a row are one turn."""
    function = ToolCallFunction(name=item.name, arguments=item.arguments)
    call = MessageToolCall(id=item.call_id, function=function)
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or reasoning is not None:
        messages.append(Message(role="assistant", tool_calls=[call], reasoning_content=reasoning))
    else:
        last.tool_calls = [*(last.tool_calls or ()), call]


def _tool(tool: FunctionTool) -> Tool:
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _response_format(text: TextConfig | None) -> ResponseFormat | None:
    wanted = text.format if text else None
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    schema = JsonSchemaFormat(name=wanted.name or "", description=wanted.description, schema=wanted.schema_)
    return ResponseFormat(type="json_schema", json_schema=schema)


def reply_messages(items: Sequence[OutputItem]) -> list[Message]:
    """A response's output as the assistant's turn of the conversation."""
    turn = Message(role="assistant")
    for item in items:
        match item:
            case ReasoningOut():
                turn.reasoning_content = (turn.reasoning_content or "") + item.content[0].text
            case MessageOut():
                turn.content = f"{turn.content or ''}{item.content[0].text}"
            case CallOut():
                function = ToolCallFunction(name=item.name, arguments=item.arguments)
                turn.tool_calls = [*(turn.tool_calls or ()), MessageToolCall(id=item.call_id, function=function)]
    return [turn]
