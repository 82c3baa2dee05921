"""The trials of benchmarks/reliability in short; the long forms print docs/reliability.md."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import page
import pytest
from flat_memory import bodies, memory_mib
from fuzz_bodies import own_mutations
from quick_client import send_all
from rough_clients import CANARY, abort_some, leave_half_open, read_slowly
from serving import Served, served
from stream_client import open_streams, read_all

OPTIONS = ("--max-model-len", "64", "--max-num-seqs", "32", "--num-pages", "400", "--num-threads", "1")


@pytest.fixture(scope="module")
def shared(tiny_folder: Path) -> Iterator[Served]:
    """`graphrunner serve` in processes of its own, with the tiny model."""
    with served("--model", str(tiny_folder), *OPTIONS) as server:
        yield server


@pytest.fixture
def server(shared: Served) -> Iterator[Served]:
    """What a test leaves behind must be a healthy server with a whole pool that says the same as before."""
    before = shared.text(*CANARY)
    yield shared
    assert shared.wait_idle(20) and shared.text(*CANARY) == before
    assert "Traceback" not in shared.log.read_text()


def test_streams_at_once_are_what_each_is_alone(server: Served) -> None:
    prompts = [f"prompt {i % 7}" for i in range(100)]
    solo = {prompt: server.text(prompt, 10) for prompt in set(prompts)}
    common = {"max_tokens": 10, "temperature": 0, "stream": True, "ignore_eos": True}
    streams = open_streams(server.port, [{"prompt": prompt, **common} for prompt in prompts])
    read_all(streams, 60)
    assert all(stream.is_complete for stream in streams)
    assert ["".join(stream.texts()) for stream in streams] == [solo[prompt] for prompt in prompts]


def test_rough_clients(server: Served) -> None:
    assert abort_some(server, 60, random.Random(3)) == 60
    assert read_slowly(server, 10, pause_s=0.5) == 10
    half_open = leave_half_open(server, 30)
    assert len(server.text(*CANARY)) > 0
    for sock in half_open:
        sock.close()


def test_fuzzed_bodies(server: Served) -> None:
    statuses, wrong = own_mutations(server, 600, random.Random(5))
    assert wrong == [] and statuses[400] > 100 and statuses[200] > 0


@pytest.mark.slow
def test_memory_is_flat(server: Served) -> None:
    send_all(server.port, bodies(0, 2000))
    before = memory_mib(server)
    answers = send_all(server.port, bodies(2000, 2000))
    growth = [now - then for now, then in zip(memory_mib(server), before, strict=True)]
    assert all(status == 200 for status, _ in answers) and max(growth) < 5, growth


def test_the_page_is_that_of_the_saved_figures() -> None:
    assert page.PAGE.read_text() == page.page(), "run: python benchmarks/reliability/page.py"
