"""What bytes each token id stands for, so that text can be joined one token at a time.

Three families of tokenizers spell bytes in their vocabulary: byte-level BPE writes each byte as one printable
character; sentencepiece-like ones write text with a visible mark for the space, and single bytes as <0xNN>. For both,
the text of a list of ids is the UTF-8 reading of the joined bytes. Anything else has no such table.
Source: bytes_to_unicode of GPT-2 (the byte alphabet).
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

_SPACE_MARK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class PieceCode(Enum):
    """How a vocabulary spells bytes."""

    BYTE_LEVEL = "byte_level"
    SENTENCEPIECE = "sentencepiece"


def _byte_of_character() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class PieceTable:
    """Bytes of every id, made when first asked for.

    `strips_first_space`: the tokenizer puts a space before a text that is not part of it, so a whole text loses one.
    """

    def __init__(self, fast: FastTokenizer, code: PieceCode, *, strips_first_space: bool) -> None:
        self._fast = fast
        self._code = code
        self.strips_first_space = strips_first_space
        self._known: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one id; none for an id outside the vocabulary."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._spell(token_id)
        return known

    def text_of(self, token_id: int) -> str | None:
        """The text of one id; None when its bytes are only part of a character."""
        try:
            return self._texts[token_id]
        except KeyError:
            pass
        try:
            text = self.bytes_of(token_id).decode("utf-8")
        except UnicodeDecodeError:
            text = None
        self._texts[token_id] = text
        return text

    def _spell(self, token_id: int) -> bytes:
        piece = self._fast.id_to_token(token_id) if token_id >= 0 else None
        if piece is None:
            return b""
        if self._code is PieceCode.BYTE_LEVEL:
            if all(character in _BYTE_OF_CHARACTER for character in piece):
                return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
            return piece.encode("utf-8", errors="replace")
        single = _BYTE_PIECE.fullmatch(piece)
        if single:
            return bytes([int(single[1], 16)])
        return piece.replace(_SPACE_MARK, " ").encode("utf-8", errors="replace")


def piece_table(fast: FastTokenizer) -> PieceTable | None:
    """The table of a fast tokenizer, or None when its decoder does more than joining bytes."""
    if fast.decoder is None:
        return None
    state = json.loads(fast.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return PieceTable(fast, PieceCode.BYTE_LEVEL, strips_first_space=False)
    if not kinds <= _SENTENCEPIECE_STEPS or not kinds & {"Replace", "Metaspace"}:
        return None
    strips = False
    for step in steps:
        is_replace = step["type"] == "Replace"
        if is_replace and (step["pattern"].get("String") != _SPACE_MARK or step["content"] != " "):
            return None
        if step["type"] == "Strip":
            if step["content"] != " " or step["stop"] or step["start"] > 1:
                return None
            strips = step["start"] == 1
        if step["type"] == "Metaspace":
            strips = step["prepend_scheme"] != "never"
    return PieceTable(fast, PieceCode.SENTENCEPIECE, strips_first_space=strips)
