"""Text of a growing output, given out as soon as it can no longer change."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from graphrunner.tokenizer.tokenizer import Tokenizer

_BROKEN = "\ufffd"


class IncrementalDetokenizer:
    """One output's text. The texts returned by append and finish join to the decoding of all its ids.

    A character that is spread over several tokens comes out whole, with its last token. Cost: constant for each token.

    Args:
        is_continuation: the output goes on after a prompt; see Tokenizer.decode.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = False,
        is_continuation: bool = True,
    ) -> None:
        self._special_ids = tokenizer.special_ids
        self._skips_special = skip_special_tokens
        self._spaces_special = spaces_between_special_tokens
        self._is_after_special = False
        self._pieces = tokenizer.pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window = None if self._pieces else _WindowDecoder(tokenizer, skip_special_tokens)
        strips = self._pieces is not None and self._pieces.strips_first_space
        self._drops_next_space = strips and not is_continuation
        self._is_between_characters = self._pieces is not None and not self._drops_next_space

    def append(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; return the text that became final, often empty."""
        if self._window is not None:
            return "".join([self._window.append(token_id) for token_id in token_ids])
        text = self._utf8.decode(b"".join([self._bytes_of(token_id) for token_id in token_ids]))
        self._is_between_characters = not (self._utf8.getstate()[0] or self._is_after_special or self._drops_next_space)
        return text

    def append_one(self, token_id: int) -> str:
        """The same for one id, at the least cost: most tokens are whole characters, whose text is known already."""
        text = self.whole_text_of(token_id)
        return self.append((token_id,)) if text is None else text

    def whole_text_of(self, token_id: int) -> str | None:
        """The next id's text when it depends on no neighbour: it has then been taken. None, with nothing done, else."""
        if self._pieces is None or not self._is_between_characters or token_id in self._special_ids:
            return None
        return self._pieces.text_of(token_id)

    def finish(self) -> str:
        """The rest: what an unfinished character leaves (U+FFFD). Call once, when no id will follow."""
        if self._window is not None:
            return self._window.finish()
        return self._utf8.decode(b"", final=True)

    def _bytes_of(self, token_id: int) -> bytes:
        assert self._pieces is not None
        is_special = token_id in self._special_ids
        if is_special and self._skips_special:
            return b""
        spelled = self._pieces.bytes_of(token_id)
        if is_special and self._is_after_special and self._spaces_special:
            spelled = b" " + spelled
        self._is_after_special = is_special
        if self._drops_next_space and spelled:
            self._drops_next_space = False
            spelled = spelled.removeprefix(b" ")
        return spelled


class _WindowDecoder:
    """For vocabularies without a table of bytes: decodes a short window twice and takes the difference.

    Ids before `_window_start` are settled. Text of the ids up to `_emitted_end` has been given out; decoding them
    together with newer ones shows how the newer ones read in context.
    Source: the streaming decoder of Hugging Face text-generation-inference (the idea).
    """

    def __init__(self, tokenizer: Tokenizer, skips_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._ids: list[int] = []
        self._window_start = 0
        self._emitted_end = 0
        self._emitted: list[str] = []

    def append(self, token_id: int) -> str:
        self._ids.append(token_id)
        settled = self._decode(self._window_start, self._emitted_end)
        text = self._decode(self._window_start, len(self._ids))
        if len(text) <= len(settled) or text.endswith(_BROKEN):
            return ""
        self._window_start, self._emitted_end = self._emitted_end, len(self._ids)
        self._emitted.append(text[len(settled) :])
        return self._emitted[-1]

    def finish(self) -> str:
        whole = self._decode(0, len(self._ids))
        return whole[len("".join(self._emitted)) :]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode_opaque(self._ids[start:end], skip_special_tokens=self._skips_special)
