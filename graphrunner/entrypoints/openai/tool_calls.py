"""Tool calls in generated text, read while they stream.

Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, text around them.
Llama: the reply is {"name": ..., "parameters": {...}}, several joined by ";", perhaps behind <|python_tag|>.
Under a forced choice the grammar gives a JSON list of calls, or the bare arguments.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

HERMES_OPEN = "<tool_call>"
HERMES_CLOSE = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class ToolFormat(Enum):
    """How a model writes its calls. AUTO takes a reply that starts with a JSON object as Llama, else Hermes."""

    NONE = "none"
    AUTO = "auto"
    HERMES = "hermes"
    LLAMA = "llama"
    LIST = "list"  # a JSON list; only under tool_choice "required"


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of call number `index`: id and name come with its first piece."""

    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


def held_back(text: str, tag: str) -> int:
    """How many last characters of `text` may be the start of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


class ForcedCallParser:
    """The whole reply is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name
        self.num_calls = 1

    def feed(self, text: str, *, is_last: bool) -> tuple[str, list[ToolDelta]]:
        """Content (never any) and pieces of the call."""
        if self._name is not None:
            name, self._name = self._name, None
            return "", [ToolDelta(0, text, _new_call_id(), name)]
        return "", [ToolDelta(0, text)] if text else []


class ToolCallParser:
    """Splits content from calls; see the module for the formats."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str], *, is_parallel: bool) -> None:
        self._format = tool_format
        self._names = names
        self._is_parallel = is_parallel
        self._pending = ""
        self._opening = ""  # the tag in front of the call being read, given back if it is none
        self._call: _CallReader | None = None
        self._is_between = False  # just behind a call: separators are swallowed
        self.num_calls = 0

    def feed(self, text: str, *, is_last: bool) -> tuple[str, list[ToolDelta]]:
        """Content and pieces of calls in the next text."""
        self._pending += text
        content: list[str] = []
        deltas: list[ToolDelta] = []
        while self._pending or is_last:
            has_moved = self._read_call(content, deltas, is_last) if self._call else self._read_text(content, is_last)
            if not has_moved:
                break
        return "".join(content), deltas

    def _read_text(self, content: list[str], is_last: bool) -> bool:
        """Move content out of the pending text up to the next call; False when more text is needed."""
        if self._format is ToolFormat.AUTO and not self._resolve_format(is_last):
            return False
        if self._is_between and not self._skip_separators(is_last):
            return False
        if self._format is ToolFormat.HERMES:
            before, tag, rest = self._pending.partition(HERMES_OPEN)
            if not tag:
                cut = len(before) - (0 if is_last else held_back(before, HERMES_OPEN))
                content.append(before[:cut])
                self._pending = before[cut:]
                return False
            content.append(before)
            self._opening, self._pending = tag, rest
        else:
            start = self._pending.lstrip(" \n\t[" if self._format is ToolFormat.LIST else " \n\t")
            if self._format is ToolFormat.LLAMA and PYTHON_TAG.startswith(start[: len(PYTHON_TAG)]) and start:
                if len(start) < len(PYTHON_TAG) and not is_last:
                    return False
                start = start.removeprefix(PYTHON_TAG)
            if not start.startswith("{"):
                if start or is_last:  # not a call: the rest is text
                    self._format = ToolFormat.HERMES
                    return bool(self._pending)
                return False
            self._opening, self._pending = self._pending[: -len(start)], start
        self._call = _CallReader(self.num_calls, self._names)
        return True

    def _resolve_format(self, is_last: bool) -> bool:
        start = self._pending.lstrip()
        if not is_last and (not start or (len(start) < len(PYTHON_TAG) and PYTHON_TAG.startswith(start))):
            return False
        is_llama = start.startswith(("{", PYTHON_TAG))
        self._format = ToolFormat.LLAMA if is_llama else ToolFormat.HERMES
        return True

    def _skip_separators(self, is_last: bool) -> bool:
        """Swallow what stands between two calls; False when it may go on in the next text."""
        if self._format is ToolFormat.HERMES:
            rest = self._pending.lstrip()
            if not is_last and len(rest) < len(HERMES_CLOSE) and HERMES_CLOSE.startswith(rest):
                return False
            self._pending = rest.removeprefix(HERMES_CLOSE)
            if rest.startswith(HERMES_CLOSE) and not self._pending.lstrip("\n") and not is_last:
                self._pending = HERMES_CLOSE  # line ends behind the tag are swallowed too: wait for what follows
                return False
            self._pending = self._pending.lstrip("\n")
        else:
            self._pending = self._pending.lstrip(" \n\t;,]")
            if not self._pending:
                return False
        self._is_between = False
        return True

    def _read_call(self, content: list[str], deltas: list[ToolDelta], is_last: bool) -> bool:
        """Feed the open call; True when it closed and there may be more."""
        assert self._call is not None
        text, self._pending = self._pending, ""
        progress = self._call.feed(text, is_last=is_last)
        if progress.is_call and (self.num_calls == 0 or self._is_parallel):
            deltas += progress.deltas
        if not progress.is_closed:
            return False
        self._pending = progress.rest
        self._call = None
        if progress.is_call:
            self.num_calls += 1
            self._is_between = True
        else:
            content.append(self._opening + progress.not_a_call)
        return bool(self._pending)


@dataclass(frozen=True, slots=True)
class _Progress:
    """What feeding a call gave: pieces, or the text back when it is no call."""

    deltas: tuple[ToolDelta, ...] = ()
    is_call: bool = True
    is_closed: bool = False
    rest: str = ""
    not_a_call: str = ""


class _CallReader:
    """Reads one JSON object that should be a call. Arguments stream out as soon as the name is known."""

    def __init__(self, index: int, names: Collection[str]) -> None:
        self._index = index
        self._names = names
        self._raw = ""
        self._object = _ObjectScanner()
        self._arguments: _ObjectScanner | None = None
        self._arguments_at = 0

    def feed(self, text: str, *, is_last: bool) -> _Progress:
        if not self._raw:
            text = text.lstrip()
        if not self._raw and not text.startswith("{") and (text or is_last):
            return _Progress(is_call=False, is_closed=True, not_a_call=text)
        end = self._object.feed(text)
        rest = "" if end is None else text[end:]
        self._raw += text if end is None else text[:end]
        is_closed = end is not None or is_last
        deltas = self._stream_arguments()
        if self._arguments is not None:
            return _Progress(deltas, is_closed=is_closed, rest=rest)
        return self._whole(rest) if is_closed else _Progress()

    def _stream_arguments(self) -> tuple[ToolDelta, ...]:
        head: ToolDelta | None = None
        if self._arguments is None:
            match = _HEAD.match(self._raw)
            if match is None or match.group(1) not in self._names:
                return ()
            head = ToolDelta(self._index, "", _new_call_id(), match.group(1))
            self._arguments = _ObjectScanner()
            self._arguments_at = match.end()
        text = self._raw[self._arguments_at :]
        if self._arguments.is_closed or not text:
            return (head,) if head else ()
        end = self._arguments.feed(text)
        piece = text if end is None else text[:end]
        self._arguments_at += len(piece)
        if head is not None:
            return (ToolDelta(self._index, piece, head.call_id, head.name),)
        return (ToolDelta(self._index, piece),)

    def _whole(self, rest: str) -> _Progress:
        """A finished object whose head did not come in the usual order."""
        not_a_call = _Progress(is_call=False, is_closed=True, rest=rest, not_a_call=self._raw)
        try:
            parsed = json.loads(self._raw)
        except (ValueError, RecursionError):
            return not_a_call
        arguments = parsed.get("arguments", parsed.get("parameters", {}))
        if parsed.get("name") not in self._names or not isinstance(arguments, (dict, str)):
            return not_a_call
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return _Progress((ToolDelta(self._index, text, _new_call_id(), parsed["name"]),), is_closed=True, rest=rest)


class _ObjectScanner:
    """Finds where a JSON object or list that starts with the first character ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self.is_closed = False

    def feed(self, text: str) -> int | None:
        """Index behind the closing bracket, or None when it is still to come."""
        for index, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_escaped = char == "\\"
                self._is_in_string = char != '"'
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_closed = True
                    return index + 1
        return None


def _new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
