"""Conversations -> text, through the model's own Jinja template in transformers' sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphrunner.core.errors import InvalidRequestError

_TOOL_TEMPLATE = "tool_use"
_DEFAULT_TEMPLATE = "default"


class ChatTemplate:
    """The templates that came with a tokenizer.

    Args:
        templates: by name; "default" is used, or "tool_use" when the request brings tools.
        special_tokens: bos_token and the like, which templates spell out.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)

    @property
    def is_available(self) -> bool:
        """Whether there is any template."""
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """The conversation as the text the model was trained on.

        Raises:
            InvalidRequestError: no template, malformed messages or tools, or the template refuses them.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        if not self._templates:
            raise InvalidRequestError(
                "messages", len(messages), "the model has no chat template; send a prompt instead"
            )
        checked = check_messages(messages)
        _check_tools(tools)
        try:
            rendered, _ = render_jinja_template(
                conversations=[checked],
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=self._choose(bool(tools)),
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # template code raises its own errors and any that its expressions meet
            first_line = str(error).strip().partition("\n")[0] or type(error).__name__
            shown = [message["role"] for message in checked]
            raise InvalidRequestError("messages", shown, f"the chat template refused them: {first_line}") from error
        return str(rendered[0])

    def _choose(self, has_tools: bool) -> str:
        if has_tools and _TOOL_TEMPLATE in self._templates:
            return self._templates[_TOOL_TEMPLATE]
        return self._templates.get(_DEFAULT_TEMPLATE) or next(iter(self._templates.values()))


def check_messages(messages: object) -> list[dict[str, object]]:
    """Messages as templates expect them: text parts joined, a role each.

    Raises:
        InvalidRequestError: names the message and the part.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages", messages, "must be a list of messages")
    if not messages:
        raise InvalidRequestError("messages", [], "must have at least one message")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(field: str, message: object) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(field, message, "must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{field}.role", role, "must be a string such as user, assistant or system")
    checked: dict[str, object] = {str(key): value for key, value in message.items()}
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise InvalidRequestError(f"{field}.content", None, "must be text")
    if content is not None:
        checked["content"] = _text_of(f"{field}.content", content)
    return checked


def _text_of(field: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequestError(field, content, "must be text or a list of parts")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text"):
            raise InvalidRequestError(f"{field}[{i}]", part, "only parts of type text are supported by this model")
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequestError(f"{field}[{i}].text", text, "must be text")
        texts.append(text)
    return "".join(texts)


def _check_tools(tools: object) -> None:
    if tools is None:
        return
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise InvalidRequestError("tools", tools, "must be a list of tool definitions")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidRequestError(f"tools[{i}]", tool, "must be an object")
