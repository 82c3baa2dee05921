"""Safetensors files, one or many: header check, then tensors read from the mapped file one at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from graphrunner.core.errors import ModelLoadError

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor: where it is and how big. `shape` as torch has it."""

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


def read_entries(paths: tuple[Path, ...]) -> list[SafetensorsEntry]:
    """List the tensors of all files, in file order, from their headers alone.

    Raises:
        ModelLoadError: truncated or corrupt file, a quantized dtype, a tensor in two files.
    """
    entries: dict[str, SafetensorsEntry] = {}
    for path in paths:
        for entry in _read_header(path):
            if entry.name in entries:
                raise ModelLoadError(f"{path}: tensor {entry.name} is also in {entries[entry.name].path.name}")
            entries[entry.name] = entry
    return list(entries.values())


def iterate_entries(entries: list[SafetensorsEntry]) -> Iterator[tuple[SafetensorsEntry, Tensor]]:
    """Yield every tensor, file by file, in its own dtype: CPU, a view of the mapped file while it is used."""
    from safetensors import SafetensorError, safe_open

    by_path: dict[Path, list[SafetensorsEntry]] = {}
    for entry in entries:
        by_path.setdefault(entry.path, []).append(entry)
    for path, members in by_path.items():
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                for entry in members:
                    yield entry, file.get_tensor(entry.name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: cannot be read as safetensors: {error}") from error


def sharded_paths(index_path: Path) -> tuple[Path, ...]:
    """The files that a model.safetensors.index.json names.

    Raises:
        ModelLoadError: the index is not valid, or a file that it names is missing.
    """
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index_path}: not a valid safetensors index: {error}") from error
    paths = tuple(index_path.parent / name for name in names)
    for path in paths:
        if not path.is_file():
            raise ModelLoadError(f"{index_path.parent}: {path.name} is missing (named by {index_path.name})")
    return paths


def _read_header(path: Path) -> Iterator[SafetensorsEntry]:
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > min(file_bytes - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"its header of {header_bytes} bytes does not fit in a file of {file_bytes}")
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        data_start = 8 + header_bytes
        for name, record in header.items():
            first, last = record["data_offsets"]
            if data_start + last > file_bytes:
                raise ValueError(f"truncated: tensor {name} ends at byte {data_start + last} of {file_bytes}")
            if record["dtype"] not in _DTYPE_BYTES:
                raise ValueError(f"tensor {name} has the unsupported dtype {record['dtype']}")
            yield SafetensorsEntry(name, path, tuple(record["shape"]), record["dtype"], last - first)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelLoadError(f"{path}: corrupt or truncated safetensors file: {error}") from error
