"""The items of a response, put together from the pieces of a reply, and the events that tell of each piece.

One item is open at a time, in the order in which the model wrote them: reasoning, a message, function calls. An event
holds copies of what it shows, so that it stays true while the item grows.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from copy import deepcopy

from graphrunner.entrypoints.openai.reply_parser import ReplyPart
from graphrunner.entrypoints.openai.responses import TokenLogprob
from graphrunner.entrypoints.openai.responses_objects import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
)
from graphrunner.entrypoints.openai.tool_calls import ToolDelta

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class ResponseBuilder:
    """State of one response's output.

    Attributes:
        items: what the response holds so far.
        num_reasoning_tokens: tokens that became reasoning.
    """

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self.num_reasoning_tokens = 0
        self._open: OutputItem | None = None
        self._call_index = -1
        self._num_pending_tokens = 0  # seen, and not yet known to be of any part: the parser may hold text back
        self._pending_logprobs: list[TokenLogprob] = []

    def feed(self, part: ReplyPart, num_tokens: int, logprobs: Sequence[TokenLogprob]) -> Iterator[ResponseEvent]:
        """Take in a piece of the reply and the tokens that came with it."""
        self._num_pending_tokens += num_tokens
        self._pending_logprobs += logprobs
        if part.reasoning:
            yield from self._reasoning(part.reasoning)
        if part.content:
            yield from self._text(part.content)
        for piece in part.tool_deltas:
            yield from self._call(piece)
        if part:
            self._num_pending_tokens = 0
            self._pending_logprobs = []

    def finish(self, *, is_complete: bool) -> Iterator[ResponseEvent]:
        """Close what is open; a reply without any text has an empty message."""
        if not self.items:
            yield from self._open_message()
        yield from self._close(COMPLETED if is_complete else INCOMPLETE)

    def _reasoning(self, text: str) -> Iterator[ResponseEvent]:
        self.num_reasoning_tokens += self._num_pending_tokens
        self._pending_logprobs = []
        item = self._open
        if not isinstance(item, ReasoningItem):
            yield from self._close(COMPLETED)
            item = ReasoningItem(_new_id("rs"), IN_PROGRESS, [])
            yield self._added(item)
            item.content.append(ReasoningText())
            yield self._here(ResponseEvent("response.content_part.added", content_index=0, part=ReasoningText()))
        item.content[0].text += text
        yield self._here(ResponseEvent("response.reasoning_text.delta", content_index=0, delta=text))

    def _text(self, text: str) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, MessageItem):
            if not text.strip() and self.items:
                return  # line ends between or behind calls are no message
            yield from self._close(COMPLETED)
            yield from self._open_message()
        assert isinstance(self._open, MessageItem)
        shown, self._pending_logprobs = self._pending_logprobs, []
        part = self._open.content[0]
        part.text += text
        part.logprobs += shown
        yield self._here(ResponseEvent("response.output_text.delta", content_index=0, delta=text, logprobs=shown))

    def _open_message(self) -> Iterator[ResponseEvent]:
        item = MessageItem(_new_id("msg"), IN_PROGRESS, [])
        yield self._added(item)
        item.content.append(OutputText(annotations=[], logprobs=[]))
        yield self._here(ResponseEvent("response.content_part.added", content_index=0, part=OutputText()))

    def _call(self, piece: ToolDelta) -> Iterator[ResponseEvent]:
        item = self._open
        if piece.index != self._call_index or not isinstance(item, FunctionCallItem):
            yield from self._close(COMPLETED)
            self._call_index = piece.index
            item = FunctionCallItem(_new_id("fc"), IN_PROGRESS, piece.call_id or _new_id("call"), piece.name or "")
            yield self._added(item)
        if piece.arguments:
            item.arguments += piece.arguments
            yield self._here(ResponseEvent("response.function_call_arguments.delta", delta=piece.arguments))

    def _added(self, item: OutputItem) -> ResponseEvent:
        self.items.append(item)
        self._open = item
        index = len(self.items) - 1
        return ResponseEvent("response.output_item.added", output_index=index, item=deepcopy(item))

    def _close(self, status: str) -> Iterator[ResponseEvent]:
        """Say that the open item, if there is one, is done."""
        item = self._open
        if item is None:
            return
        item.status = status
        if isinstance(item, FunctionCallItem):
            yield self._here(
                ResponseEvent("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
            )
        else:
            part = deepcopy(item.content[0])
            if isinstance(part, OutputText):
                kind, logprobs = "response.output_text.done", part.logprobs
                yield self._here(ResponseEvent(kind, content_index=0, text=part.text, logprobs=logprobs))
            else:
                yield self._here(ResponseEvent("response.reasoning_text.done", content_index=0, text=part.text))
            yield self._here(ResponseEvent("response.content_part.done", content_index=0, part=part))
        index = len(self.items) - 1
        yield ResponseEvent("response.output_item.done", output_index=index, item=deepcopy(item))
        self._open = None

    def _here(self, event: ResponseEvent) -> ResponseEvent:
        """The event, placed at the open item."""
        assert self._open is not None
        event.output_index, event.item_id = len(self.items) - 1, self._open.id
        return event


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
