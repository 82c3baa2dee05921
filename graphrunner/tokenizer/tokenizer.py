"""Text to token ids and back, for one model."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from graphrunner.core.errors import InvalidRequestError
from graphrunner.tokenizer.chat_template import ChatTemplate
from graphrunner.tokenizer.pieces import PieceTable, piece_table

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer


LONG_TEXT_LEN = 4096
"""Characters from which on a text is encoded without Python's lock; a shorter one is done at once."""


class SlowTokenizer(Protocol):
    """The part of a transformers tokenizer without a fast twin that we use."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str: ...

    def __len__(self) -> int: ...


class Tokenizer:
    """One model's tokenizer. Immutable; encode and decode may be called from several threads.

    Args:
        fast: the tokenizers library's object; None for the few models that only have a Python one.
        slow: used when fast is None.
        special_ids: ids that skip_special_tokens leaves out.
        eos_token_ids: ids that end an answer.
        chat_template: templates of conversations, maybe none.
    """

    def __init__(
        self,
        fast: FastTokenizer | None,
        *,
        slow: SlowTokenizer | None = None,
        special_ids: frozenset[int] = frozenset(),
        eos_token_ids: tuple[int, ...] = (),
        bos_token_id: int | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        assert fast is not None or slow is not None, "a tokenizer needs a backend"
        self._fast = fast
        self._slow = slow
        self.special_ids = special_ids
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id
        self.chat_template = chat_template or ChatTemplate({}, {})
        self.pieces: PieceTable | None = piece_table(fast) if fast is not None else None

    @property
    def vocab_size(self) -> int:
        """Ids known to the tokenizer, added ones included; the model's own vocabulary may be padded beyond it."""
        if self._fast is not None:
            return int(self._fast.get_vocab_size(with_added_tokens=True))
        assert self._slow is not None
        return len(self._slow)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with the model's own first (and last) tokens if it has any.

        Raises:
            InvalidRequestError: not a string, or one that is not valid Unicode (a lone surrogate).
        """
        if not isinstance(text, str):
            raise InvalidRequestError("prompt", text, "must be text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            shown = ascii(text[error.start : error.end])
            raise InvalidRequestError("prompt", shown, f"not valid Unicode at character {error.start}") from None
        if self._fast is not None:
            if len(text) < LONG_TEXT_LEN:
                return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)
            # Of the library's calls only those for batches release the lock, and seconds of it would stop every stream.
            return list(self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        assert self._slow is not None
        return list(self._slow.encode(text, add_special_tokens=add_special_tokens))

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = False,
        is_continuation: bool = False,
    ) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD.

        Args:
            skip_special_tokens: leave special tokens out.
            spaces_between_special_tokens: one space between two special tokens that follow each other.
            is_continuation: the ids go on after others, so a first space is theirs and is kept.

        Differs: for sentencepiece-like vocabularies a run of byte tokens that is partly broken keeps its whole
        characters, where the tokenizers library gives up the run.
        """
        if self.pieces is None:
            return self.decode_opaque(ids, skip_special_tokens=skip_special_tokens)
        joined = bytearray()
        is_after_special = False
        for token_id in ids:
            is_special = token_id in self.special_ids
            if is_special and skip_special_tokens:
                continue
            if is_special and is_after_special and spaces_between_special_tokens:
                joined += b" "
            joined += self.pieces.bytes_of(token_id)
            is_after_special = is_special
        if self.pieces.strips_first_space and not is_continuation and joined.startswith(b" "):
            del joined[:1]
        return codecs.decode(bytes(joined), "utf-8", "replace")

    def decode_opaque(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode through the backend, for vocabularies without a table of bytes."""
        if self._fast is not None:
            return str(self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens))
        assert self._slow is not None
        return str(self._slow.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be part of a character; special tokens give their spelling."""
        if self.pieces is not None:
            return self.pieces.bytes_of(token_id)
        return self.decode_opaque([token_id], skip_special_tokens=False).encode()

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary; None if there is none."""
        return self._fast.token_to_id(token) if self._fast is not None else None

    @property
    def backend(self) -> FastTokenizer | SlowTokenizer:
        """The library object inside, for tools that need a vocabulary (grammars)."""
        backend = self._fast if self._fast is not None else self._slow
        assert backend is not None
        return backend

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation; the template itself spells special tokens, none are added.

        Raises:
            InvalidRequestError: as ChatTemplate.render and encode.
        """
        text = self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return self.encode(text, add_special_tokens=False)
