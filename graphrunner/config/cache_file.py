"""Small texts kept in the user's cache: whole or not there, whatever happens to disk and process."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path


def digest(*parts: str) -> str:
    """A name for texts: equal for equal ones."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_cached(path: Path) -> str | None:
    """What `write_cached` put there; None where there is nothing, or it is torn, altered, or not ours."""
    try:
        claimed, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, ValueError):
        return None
    return text if claimed == digest(text) else None


def write_cached(path: Path, text: str) -> None:
    """Keep `text`, under a digest of it. Another process sees all of it or what was there before.

    Raises:
        OSError: it could not be kept, and nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{digest(text)}\n{text}")
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
