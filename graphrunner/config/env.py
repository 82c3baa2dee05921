"""The only reader of the environment, and the one thing we put into it."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where compiled artefacts and tuned tables are kept: GRAPHRUNNER_CACHE, else the user's cache folder."""
    own = os.environ.get("GRAPHRUNNER_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphrunner"


def has_nvtx() -> bool:
    """Whether GRAPHRUNNER_NVTX asks for profiler ranges, as `--nvtx` does."""
    return os.environ.get("GRAPHRUNNER_NVTX", "0").lower() not in ("", "0", "false", "off")


def limit_thread_spinning() -> None:
    """Let the threads of an operator sleep soon when they wait for each other, unless the user says otherwise.

    GNU OpenMP spins for about a millisecond by default. Where anything else runs on the machine, the thread that is
    waited for has then lost its core to one that waits, and a step takes ten times as long. Read when torch is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def log_level() -> str:
    """GRAPHRUNNER_LOG: debug, info, warning (default) or error."""
    return os.environ.get("GRAPHRUNNER_LOG", "warning").lower()
