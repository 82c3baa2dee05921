"""The GGUF container: metadata and a table of tensors over one memory-mapped file.

Layout (little endian): magic, version, tensor count, pair count; the pairs; one record a tensor (name, dimensions
innermost first, type, offset); padding to the alignment; the data.
Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphrunner.core.errors import ModelLoadError
from graphrunner.weights.gguf_header import BadHeaderError, HeaderCursor, MetadataValue, opened_header
from graphrunner.weights.gguf_quants import GGMLType, ggml_type

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
        with opened_header(path) as cursor:
            self.file_bytes = path.stat().st_size
            num_tensors = cursor.start()
            self.metadata: dict[str, MetadataValue] = cursor.metadata()
            alignment = self.metadata.get("general.alignment", 32)
            self.tensors: dict[str, GGUFTensor] = _read_tensors(cursor, num_tensors, alignment, path)
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


def _read_tensors(cursor: HeaderCursor, count: int, alignment: object, path: Path) -> dict[str, GGUFTensor]:
    records = [_read_tensor_record(cursor) for _ in range(count)]
    if not isinstance(alignment, int) or alignment <= 0:
        raise BadHeaderError(f"general.alignment={alignment!r}")
    data_start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, number, offset in records:
        kind = ggml_type(number, name, str(path))
        num_values = math.prod(shape)
        if num_values % kind.block_len or (shape and shape[-1] % kind.block_len):
            raise BadHeaderError(f"tensor {name} with shape {list(shape)} is not made of {kind.name} blocks")
        num_bytes = num_values // kind.block_len * kind.block_bytes
        tensors[name] = GGUFTensor(name, shape, kind, data_start + offset, num_bytes)
    return tensors


def _read_tensor_record(cursor: HeaderCursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    num_dimensions = cursor.integer("I")
    if num_dimensions > _MAX_DIMENSIONS:
        raise BadHeaderError(f"tensor {name} has {num_dimensions} dimensions")
    innermost_first = [cursor.integer("Q") for _ in range(num_dimensions)]
    return name, tuple(reversed(innermost_first)), cursor.integer("I"), cursor.integer("Q")
