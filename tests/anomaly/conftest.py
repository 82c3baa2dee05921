"""A server on a thread before a real engine with a tiny model, whose parts can be made to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from failing import Tried, config_of, start_tried
from tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start(tiny_folder: Path) -> Iterator[Callable[[], Tried]]:
    made: list[Tried] = []

    def make() -> Tried:
        made.append(start_tried(config_of(tiny_folder)))
        return made[-1]

    yield make
    for each in made:
        each.stop()
