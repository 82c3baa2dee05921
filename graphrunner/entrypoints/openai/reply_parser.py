"""A chat reply taken apart while it streams: reasoning, content, tool calls.

No text is ever lost: what turns out not to be a call comes back as content.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum

from graphrunner.entrypoints.openai.tool_calls import ForcedCallParser, ToolCallParser, ToolDelta, ToolFormat, held_back

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """What one delta of text means; empty where there is nothing."""

    reasoning: str = ""
    content: str = ""
    tool_deltas: tuple[ToolDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_deltas)


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How the replies of one request are to be read.

    Attributes:
        has_reasoning: whether text in think tags is reasoning.
        is_thinking: whether the prompt left a think tag open.
        tool_format: NONE leaves everything content.
        tool_names: functions that may be called.
        forced_name: the whole reply is the arguments of this function.
        has_parallel_calls: whether more than the first call counts.
    """

    has_reasoning: bool = False
    is_thinking: bool = False
    tool_format: ToolFormat = ToolFormat.NONE
    tool_names: Collection[str] = ()
    forced_name: str | None = None
    has_parallel_calls: bool = True

    def parser(self) -> ReplyParser:
        """A fresh parser, for one choice."""
        return ReplyParser(self)


class ReplyParser:
    """State of one choice."""

    def __init__(self, reply_format: ReplyFormat) -> None:
        self._thinking = _ThinkSplitter(reply_format.is_thinking) if reply_format.has_reasoning else None
        self._tools: ToolCallParser | ForcedCallParser | None = None
        if reply_format.forced_name is not None:
            self._tools = ForcedCallParser(reply_format.forced_name)
        elif reply_format.tool_format is not ToolFormat.NONE:
            self._tools = ToolCallParser(
                reply_format.tool_format, reply_format.tool_names, is_parallel=reply_format.has_parallel_calls
            )

    @property
    def has_calls(self) -> bool:
        """Whether a tool call was seen."""
        return self._tools is not None and self._tools.num_calls > 0

    @property
    def is_plain(self) -> bool:
        """Whether every further text is content as it stands, so that it need not be fed."""
        return self._tools is None and (self._thinking is None or self._thinking.is_over)

    def feed(self, text: str, *, is_last: bool) -> ReplyPart:
        """The meaning of the next piece of text; `is_last` lets go of everything held back."""
        part = ReplyPart(content=text)
        if self._thinking is not None:
            part = self._thinking.feed(text, is_last=is_last)
        if self._tools is not None:
            content, deltas = self._tools.feed(part.content, is_last=is_last)
            part = replace(part, content=content, tool_deltas=tuple(deltas))
        return part


class _ThinkSplitter:
    """Splits one leading think block from what follows it; line ends next to the tags belong to neither."""

    def __init__(self, is_thinking: bool) -> None:
        self._pending = ""
        self._stage = _Stage.THINKING if is_thinking else _Stage.START

    @property
    def is_over(self) -> bool:
        """Whether no reasoning can follow."""
        return self._stage is _Stage.DONE

    def feed(self, text: str, *, is_last: bool) -> ReplyPart:
        self._pending += text
        if self._stage is _Stage.START:
            start = self._pending.lstrip()
            if start.startswith(THINK_OPEN):
                self._stage, self._pending = _Stage.OPENED, start[len(THINK_OPEN) :]
            elif THINK_OPEN.startswith(start) and not is_last:
                return ReplyPart()
            else:
                self._stage = _Stage.DONE
        reasoning = ""
        if self._stage in (_Stage.OPENED, _Stage.THINKING):
            reasoning = self._reasoning(is_last)
        if self._stage is _Stage.CLOSED:
            self._pending = self._pending.lstrip("\n")
            self._stage = _Stage.DONE if self._pending else _Stage.CLOSED
        if self._stage is not _Stage.DONE:
            return ReplyPart(reasoning=reasoning)
        content, self._pending = self._pending, ""
        return ReplyPart(reasoning=reasoning, content=content)

    def _reasoning(self, is_last: bool) -> str:
        """Take the reasoning out of the pending text, up to the closing tag or what may be its start."""
        if self._stage is _Stage.OPENED:
            self._pending = self._pending.lstrip("\n")
            self._stage = _Stage.THINKING if self._pending else _Stage.OPENED
        reasoning, tag, rest = self._pending.partition(THINK_CLOSE)
        if tag:
            self._stage, self._pending = _Stage.CLOSED, rest
            return reasoning.rstrip("\n")
        visible = self._pending
        if not is_last:
            visible = visible[: len(visible) - held_back(visible, THINK_CLOSE)].rstrip("\n")
        self._pending = self._pending[len(visible) :]
        return visible


class _Stage(Enum):
    """How far the splitter is."""

    START = "start"
    OPENED = "opened"  # behind the opening tag, perhaps before line ends
    THINKING = "thinking"
    CLOSED = "closed"  # behind the closing tag, perhaps before line ends
    DONE = "done"
