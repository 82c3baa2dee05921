"""The only reader of the environment."""

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


def log_level() -> str:
    """GRAPHRUNNER_LOG: debug, info, warning (default) or error."""
    return os.environ.get("GRAPHRUNNER_LOG", "warning").lower()
