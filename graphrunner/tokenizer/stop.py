"""Stop strings, found on the joined text so that neither token nor chunk borders matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphrunner.core.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class StopResult:
    """What one append released.

    `text` may be shown now and never changes. `stop` is the string that ended the output, or None.
    """

    text: str
    stop: str | None = None


class _Pattern:
    """One stop string as an automaton (Knuth, Morris, Pratt): how much of it the text's end matches."""

    __slots__ = ("_fallback", "matched_len", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched_len = 0
        # _fallback[n]: length of the longest proper prefix of stop[:n] that is also its suffix.
        self._fallback = [0, 0]
        for i in range(1, len(stop)):
            length = self._fallback[i]
            while length and stop[i] != stop[length]:
                length = self._fallback[length]
            self._fallback.append(length + (stop[i] == stop[length]))

    def advance(self, character: str) -> bool:
        """Take one character; whether the stop string ends here."""
        stop, length = self.stop, self.matched_len
        while length and stop[length] != character:
            length = self._fallback[length]
        self.matched_len = length + (stop[length] == character)
        return self.matched_len == len(stop)


class StopMatcher:
    """Watches one output's text for stop strings.

    The output ends at the first character that completes a stop string; of several completed there, the longest
    counts. Text is held back only while it is the beginning of a stop string: the longest such end of the text.

    Raises:
        InvalidRequestError: an empty stop string.
    """

    def __init__(self, stop_strings: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        for stop in stop_strings:
            if not isinstance(stop, str) or not stop:
                raise InvalidRequestError("stop", list(stop_strings), "every stop must be a string that is not empty")
        self._patterns = [_Pattern(stop) for stop in sorted(set(stop_strings), key=len, reverse=True)]
        self._is_stop_included = include_stop_str_in_output
        self._held = ""
        self._is_stopped = False

    def append(self, text: str) -> StopResult:
        """Take the next text; return what may be shown. After a stop all further text is dropped."""
        if not self._patterns:
            return StopResult(text)
        if self._is_stopped:
            return StopResult("")
        for i, character in enumerate(text):
            # Every pattern must see every character, so no short cut here; the list is sorted longest first.
            ended = [pattern for pattern in self._patterns if pattern.advance(character)]
            if ended:
                return self._stopped(self._held + text[: i + 1], ended[0].stop)
        seen = self._held + text
        num_released = len(seen) - max(pattern.matched_len for pattern in self._patterns)
        self._held = seen[num_released:]
        return StopResult(seen[:num_released])

    def finish(self) -> str:
        """The text still held back: the output ended and no stop string can complete any more."""
        held, self._held = self._held, ""
        return held

    def _stopped(self, seen: str, stop: str) -> StopResult:
        self._is_stopped = True
        self._held = ""
        return StopResult(seen if self._is_stop_included else seen[: len(seen) - len(stop)], stop)
