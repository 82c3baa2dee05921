"""Configurations with transformers' defaults filled in, kept on disk: importing transformers takes seconds.

Note [a cached configuration]. A file's name is a digest of all that the answer depends on: config.json as read, the
installed release of transformers, and our format. A file that is torn, altered or not ours is not taken for an answer;
it is written again. Nothing here ever fails a start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from graphrunner.config.cache_file import digest, read_cached, write_cached
from graphrunner.config.env import cache_dir
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)

_FORMAT = "1"
_OTHER_INPUTS = ("auto_map", "configuration_files")
"""Fields that make a configuration depend on more than its text: code of the checkpoint's own, and other files."""


class ConfigCache:
    """One folder under the user's cache, one small file a configuration. Processes may share it.

    Args:
        folder: None is `configurations` in the user's cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def get(self, raw: Mapping[str, object]) -> dict[str, object] | None:
        """What was kept for a config.json; None where nothing usable was. Never imports transformers."""
        path = self._path(raw)
        text = None if path is None else read_cached(path)
        if text is None:
            return None
        value = json.loads(text)
        return value if isinstance(value, dict) else None

    def put(self, raw: Mapping[str, object], config: Mapping[str, object]) -> None:
        """Keep `config`, which is made of JSON's own types, for the next start; nothing where that may not be done."""
        path = self._path(raw)
        if path is None:
            return
        try:
            write_cached(path, json.dumps(config))
        except OSError as cause:
            log.info("a configuration could not be kept: %s", cause)

    def _path(self, raw: Mapping[str, object]) -> Path | None:
        """Where the answer for `raw` is kept; None for one that must be made anew at every start."""
        if not isinstance(raw.get("model_type"), str) or _mentions(raw, _OTHER_INPUTS):
            return None
        try:
            version = metadata.version("transformers")
            folder = self._folder if self._folder is not None else cache_dir() / "configurations"
        except (metadata.PackageNotFoundError, RuntimeError):  # the second: a user without a home
            return None
        if "dev" in version:  # not a release: the same name may mean other code tomorrow
            return None
        return folder / f"{digest(_FORMAT, version, json.dumps(raw, sort_keys=True))[:24]}.json"


def _mentions(value: object, names: tuple[str, ...]) -> bool:
    """Whether one of the fields is there, at any depth."""
    if isinstance(value, Mapping):
        return any(name in value for name in names) or any(_mentions(each, names) for each in value.values())
    return isinstance(value, list) and any(_mentions(each, names) for each in value)
