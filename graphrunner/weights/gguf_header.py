"""The start of a GGUF file: magic, version, counts, and the metadata pairs. Free of torch.

Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from graphrunner.core.errors import ModelLoadError

MetadataValue: TypeAlias = int | float | bool | str | Sequence[object]

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9


class BadHeaderError(Exception):
    """The header contradicts itself or ends too early; the message says how, without the file's name."""


class HeaderCursor:
    """Reads the header bytes in order.

    Raises (every method):
        BadHeaderError: a read past the end, or a value that cannot be.
    """

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self.at = 0

    def start(self) -> int:
        """Read magic, version and counts; the number of tensors. `metadata` comes next."""
        magic = self._mapped[:4]
        if magic != _MAGIC:
            raise BadHeaderError(f"not a GGUF file (starts with {magic!r})")
        self.at = 4
        version = self.integer("I")
        if version not in (2, 3):
            raise BadHeaderError(f"GGUF version {version} is not supported (supported: 2, 3)")
        num_tensors, self._num_pairs = self.integer("Q"), self.integer("Q")
        return num_tensors

    def metadata(self) -> dict[str, MetadataValue]:
        """The pairs; to be read right after `start`."""
        pairs: dict[str, MetadataValue] = {}
        for _ in range(self._num_pairs):
            key = self.text()
            pairs[key] = self._value(self.integer("I"))
        return pairs

    def integer(self, code: str) -> int:
        """One integer, by its letter in `struct`."""
        return int(self._unpack(code)[0])

    def text(self) -> str:
        """One string: its length and its bytes."""
        num_bytes = self.integer("Q")
        self._check_room(num_bytes, "a string")
        start, self.at = self.at, self.at + num_bytes
        return self._mapped[start : self.at].decode("utf-8", errors="surrogateescape")

    def _value(self, code: int) -> MetadataValue:
        if code == _STRING:
            return self.text()
        if code in _SCALARS:
            value: int | float | bool = self._unpack(_SCALARS[code])[0]
            return value
        if code != _ARRAY:
            raise BadHeaderError(f"unknown value type {code} near byte {self.at}")
        item_code, count = self.integer("I"), self.integer("Q")
        self._check_room(count, "an array")  # every item has a byte at least
        if item_code in _SCALARS:
            return list(self._unpack(f"{count}{_SCALARS[item_code]}"))
        if item_code == _STRING:
            return [self.text() for _ in range(count)]
        return [self._value(item_code) for _ in range(count)]

    def _unpack(self, layout: str) -> tuple:
        num_bytes = struct.calcsize("<" + layout)
        self._check_room(num_bytes, "a value")
        values = struct.unpack_from("<" + layout, self._mapped, self.at)
        self.at += num_bytes
        return values

    def _check_room(self, num_bytes: int, what: str) -> None:
        if num_bytes > len(self._mapped) - self.at:
            raise BadHeaderError(
                f"cut off inside the header: {what} at byte {self.at} needs {num_bytes} bytes more, "
                f"the file has {len(self._mapped)}"
            )


@contextmanager
def opened_header(path: Path) -> Iterator[HeaderCursor]:
    """A cursor at the start of the file. Every error inside becomes a ModelLoadError of one line."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            cursor = HeaderCursor(mapped)
            try:
                yield cursor
            except BadHeaderError as error:
                raise ModelLoadError(f"{path}: {error}") from None
            except (OverflowError, MemoryError, RecursionError) as error:
                raise ModelLoadError(f"{path}: damaged GGUF header near byte {cursor.at}: {error}") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read as GGUF: {error}") from error


def read_gguf_metadata(path: Path) -> dict[str, MetadataValue]:
    """The metadata of a GGUF file. Raises ModelLoadError."""
    with opened_header(path) as cursor:
        cursor.start()
        return cursor.metadata()
