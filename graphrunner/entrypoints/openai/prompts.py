"""Prompts of a request as token ids, checked against the model before anything enters the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.entrypoints.openai.engine_client import EngineClient, ServerTokenizer
from graphrunner.entrypoints.openai.errors import bad_request
from graphrunner.entrypoints.openai.protocol import Message, MessageToolCall, TextPart, Tool

MAX_PROMPTS = 256
LONG_LEN = 1 << 16
"""Characters (or ids) from which on a text waits behind others like it only; its tokens take a tenth of a second."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """`text` is None when the prompt came as ids; `first_text`, its first token's, is filled in for an echo only."""

    text: str | None
    token_ids: Sequence[int]
    first_text: str = ""


class PromptEncoder:
    """Tokenizes on threads of its own: a long text holds up no stream, and only the long ones behind it."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._long_executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")

    def close(self) -> None:
        for executor in (self._executor, self._long_executor):
            executor.shutdown(wait=False, cancel_futures=True)

    async def encode(self, prompts: Sequence[str | list[int]], field: str) -> list[EncodedPrompt]:
        """Token ids of prompts that `prompts_of` took apart. Raises ApiError naming `field`."""
        encoded: list[EncodedPrompt] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                ids = await self._on_thread(len(prompt), self._tokenizer(field).encode, prompt)
                encoded.append(EncodedPrompt(prompt, ids))
            else:
                encoded.append(EncodedPrompt(None, prompt))
        for each in encoded:
            self.check_ids(each.token_ids, field)
        return encoded

    async def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation under the model's template."""
        turns = [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]
        functions = [tool.model_dump(exclude_none=True) for tool in tools or ()] or None
        tokenizer = self._tokenizer("messages")

        def render() -> list[int]:
            return tokenizer.apply_chat_template(turns, add_generation_prompt=add_generation_prompt, tools=functions)

        try:
            ids = await self._on_thread(_size(turns), render)
        except InvalidRequestError:
            raise
        except Exception:  # a template is a program that came with the model; it raises what it likes
            raise bad_request("messages", "the model's chat template refuses this conversation") from None
        self.check_ids(ids, "messages")
        return ids

    async def decode(self, ids: Sequence[int], field: str) -> str:
        """The text of token ids."""
        return await self._on_thread(len(ids), self._tokenizer(field).decode, ids)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Refuse an empty prompt and ids that the model does not have."""
        if not ids:
            raise bad_request(field, "must not be empty", "invalid_value")
        vocab_size = self._client.vocab_size
        for token_id in (min(ids), max(ids)):  # of millions, in a moment
            if not 0 <= token_id < vocab_size:
                problem = f"token id {str(token_id)[:20]} is not from 0 to {vocab_size - 1}"
                raise bad_request(field, problem, "invalid_value")

    def check_room(self, ids: Sequence[int], params: SamplingParams, field: str) -> None:
        """Refuse a prompt that leaves no room for one output token, and parameters with unknown ids."""
        params.check_vocab(self._client.vocab_size)
        limit = self._client.max_model_len
        if len(ids) >= limit:
            problem = f"has {len(ids)} tokens, and the context of {limit} tokens must leave room for one more"
            raise bad_request(field, problem, "context_length_exceeded")
        if params.stop_strings and self._client.tokenizer is None:
            raise bad_request("stop", "the engine has no tokenizer", "invalid_value")

    def _tokenizer(self, field: str) -> ServerTokenizer:
        tokenizer = self._client.tokenizer
        if tokenizer is None:
            raise bad_request(field, "the engine has no tokenizer: send token ids", "invalid_value")
        return tokenizer

    async def _on_thread(self, size: int, call: Callable[..., Result], *args: object) -> Result:
        executor = self._executor if size < LONG_LEN else self._long_executor
        return await asyncio.get_running_loop().run_in_executor(executor, call, *args)


def prompts_of(value: object, field: str) -> list[str | list[int]]:
    """Take apart text, a list of texts, token ids, or a list of token ids.

    Raises:
        ApiError: empty, mixed, or of another type.
    """
    if isinstance(value, str):
        return [_checked_text(value, field)]
    if not isinstance(value, list):
        raise bad_request(field, "must be text, token ids, or a list of either", "invalid_value")
    if not value:
        raise bad_request(field, "must not be empty", "invalid_value")
    if all(_is_id(item) for item in value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise bad_request(field, f"holds {len(value)} prompts and at most {MAX_PROMPTS} are allowed", "invalid_value")
    if all(isinstance(item, str) for item in value):
        return [_checked_text(item, field) for item in value]
    if all(isinstance(item, list) and item and all(map(_is_id, item)) for item in value):
        return list(value)
    raise bad_request(field, "must be text, token ids, or a list of either, none of them empty", "invalid_value")


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _checked_text(text: str, field: str) -> str:
    if not text:
        raise bad_request(field, "must not be empty", "invalid_value")
    if "\x00" in text:
        raise bad_request(field, "must not hold NUL characters", "invalid_value")
    return text


def _turn(message: Message, place: str) -> Mapping[str, object]:
    """A message as chat templates expect it: plain text, arguments of calls as objects."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
    if content is None and not message.tool_calls and message.role != "assistant":
        raise bad_request(f"{place}.content", "is required", "missing_required_parameter")
    if content and "\x00" in content:
        raise bad_request(f"{place}.content", "must not hold NUL characters", "invalid_value")
    if message.role == "tool" and message.tool_call_id is None:
        raise bad_request(f"{place}.tool_call_id", "is required", "missing_required_parameter")
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, object] = {"role": role, "content": content or ""}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turn


def _size(turns: Sequence[Mapping[str, object]]) -> int:
    """Characters of a conversation, and some for each of its turns."""
    return sum(len(str(turn["content"])) + 16 for turn in turns)


def _call(call: MessageToolCall) -> Mapping[str, object]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> object:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text
