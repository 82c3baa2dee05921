"""The GGUF container: metadata and a table of tensors over one memory-mapped file.

Layout (little endian): magic, version, tensor count, pair count; the pairs; one record a tensor (name, dimensions
innermost first, type, offset); padding to the alignment; the data.
Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from graphrunner.core.errors import ModelLoadError
from graphrunner.weights.gguf_quants import GGMLType, ggml_type

MetadataValue: TypeAlias = int | float | bool | str | Sequence[object]

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of the file.

    `shape` is outermost first, as torch has it; `start` is the first byte of its data in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLType
    start: int
    num_bytes: int


class GGUFFile:
    """An opened GGUF file. Reading the header costs milliseconds; data are mapped, and read when used.

    Raises:
        ModelLoadError: not a GGUF file, an unknown version, a truncated one, an unsupported tensor type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file_bytes = path.stat().st_size
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                header = _Header(mapped, path)
                self.metadata: dict[str, MetadataValue] = header.metadata
                self.tensors: dict[str, GGUFTensor] = header.tensors
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path}: cannot be read as GGUF: {error}") from error
        for tensor in self.tensors.values():
            if tensor.start + tensor.num_bytes > self.file_bytes:
                raise ModelLoadError(
                    f"{path}: truncated GGUF: tensor {tensor.name} ends at byte {tensor.start + tensor.num_bytes}, "
                    f"the file has {self.file_bytes}"
                )
        self._bytes: Tensor | None = None

    def raw(self, tensor: GGUFTensor) -> Tensor:
        """The undecoded bytes of a tensor: uint8 [num_bytes], CPU, a view of the mapped file."""
        if self._bytes is None:
            self._bytes = torch.from_file(str(self.path), shared=False, size=self.file_bytes, dtype=torch.uint8)
        return self._bytes[tensor.start : tensor.start + tensor.num_bytes]


class _Header:
    """Cursor over the header bytes; every read past the end means a truncated file."""

    def __init__(self, mapped: mmap.mmap, path: Path) -> None:
        self._mapped = mapped
        self._path = path
        self._at = 4
        if mapped[:4] != _MAGIC:
            raise ModelLoadError(f"{path}: not a GGUF file (starts with {mapped[:4]!r})")
        try:
            version = self._scalar("I")
            if version not in (2, 3):
                raise ModelLoadError(f"{path}: GGUF version {version} is not supported (supported: 2, 3)")
            num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
            self.metadata = self._read_pairs(int(num_pairs))
            self.tensors = self._read_tensors(int(num_tensors))
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise ModelLoadError(f"{path}: corrupt or truncated GGUF header near byte {self._at}: {error}") from error

    def _scalar(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack_from("<" + code, self._mapped, self._at)[0]
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        (num_bytes,) = struct.unpack_from("<Q", self._mapped, self._at)
        start = self._at + 8
        self._at = start + num_bytes
        if self._at > len(self._mapped):
            raise IndexError(f"a string of {num_bytes} bytes passes the end")
        return self._mapped[start : self._at].decode("utf-8", errors="surrogateescape")

    def _value(self, code: int) -> MetadataValue:
        if code == _STRING:
            return self._string()
        if code in _SCALARS:
            return self._scalar(_SCALARS[code])
        if code != _ARRAY:
            raise IndexError(f"unknown value type {code}")
        item_code, count = int(self._scalar("I")), int(self._scalar("Q"))
        if count > len(self._mapped):
            raise IndexError(f"an array of {count} values passes the end")
        if item_code in _SCALARS:
            items = list(struct.unpack_from(f"<{count}{_SCALARS[item_code]}", self._mapped, self._at))
            self._at += count * struct.calcsize("<" + _SCALARS[item_code])
            return items
        if item_code == _STRING:
            return [self._string() for _ in range(count)]
        return [self._value(item_code) for _ in range(count)]

    def _read_pairs(self, count: int) -> dict[str, MetadataValue]:
        pairs: dict[str, MetadataValue] = {}
        for _ in range(count):
            key = self._string()
            pairs[key] = self._value(int(self._scalar("I")))
        return pairs

    def _read_tensors(self, count: int) -> dict[str, GGUFTensor]:
        records = [self._read_tensor_record() for _ in range(count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise IndexError(f"general.alignment={alignment!r}")
        data_start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, number, offset in records:
            kind = ggml_type(number, name, str(self._path))
            num_values = math.prod(shape)
            if num_values % kind.block_len or (shape and shape[-1] % kind.block_len):
                raise IndexError(f"tensor {name} with shape {list(shape)} is not made of {kind.name} blocks")
            num_bytes = num_values // kind.block_len * kind.block_bytes
            tensors[name] = GGUFTensor(name, shape, kind, data_start + offset, num_bytes)
        return tensors

    def _read_tensor_record(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = int(self._scalar("I"))
        if num_dimensions > _MAX_DIMENSIONS:
            raise IndexError(f"tensor {name} has {num_dimensions} dimensions")
        innermost_first = [int(self._scalar("Q")) for _ in range(num_dimensions)]
        return name, tuple(reversed(innermost_first)), int(self._scalar("I")), int(self._scalar("Q"))
