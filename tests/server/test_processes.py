"""Front and core as real processes: whichever dies takes the other along, at any moment, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

HERE = Path(__file__).parent
LIMIT_S = 30.0  # the promise is 10 s; a machine that tests several things at once may need longer
LATER = [0.02, 0.05, 0.2, 0.3, 0.5, 0.6, 0.8, 1.0]
SLOW = {"prompt": "slow", "ignore_eos": True, "max_tokens": 60, "stream": True}


def until(is_true: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline_s, f"waited in vain: {what}"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


class Front:
    """A front process, its standard error as it comes, and the folder its sockets are in."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "scripted_front.py"), *args],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def url(self) -> str:
        until(lambda: any("listening" in line for line in self.lines), "the front listens")
        found = re.search(r"http://[\d.:]+", self.lines[0])
        assert found is not None
        return found.group()

    def wait_ready(self) -> None:
        until(lambda: "ready" in self.lines, "the front is ready")

    def core_pid(self) -> int:
        front = psutil.Process(self.process.pid)
        until(lambda: len(front.children()) == 1, "the front has a core")
        return front.children()[0].pid

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, trust_env=False)

    def end(self) -> int:
        """Wait for its end; the exit code."""
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        return code

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def check_nothing_left(self, *pids: int) -> None:
        for pid in pids:
            until(lambda pid=pid: not is_running(pid), f"process {pid} is gone")  # type: ignore[misc]
        assert list(self.folder.glob("graphrunner-*")) == [], "sockets were left on the disk"
        if any("listening" in line for line in self.lines):
            port = int(self.url.rpartition(":")[2])
            with socket.socket() as again:
                again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                again.bind(("127.0.0.1", port))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Front]]:
    fronts: list[Front] = []

    def make(*args: str) -> Front:
        fronts.append(Front(tmp_path, *args))
        return fronts[-1]

    yield make
    for front in fronts:
        if front.process.poll() is None:
            front.process.kill()
        front.process.wait(LIMIT_S)


def open_stream(front: Front) -> tuple[threading.Thread, list[str]]:
    """A request that takes a while, read on a thread; its lines as they come."""
    lines: list[str] = []

    def read() -> None:
        with (
            suppress(httpx.TransportError),  # a killed front says nothing more
            front.http() as http,
            http.stream("POST", "/v1/completions", json=SLOW) as answer,
        ):
            for line in answer.iter_lines():
                lines.append(line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    until(lambda: busy(front), "the request runs")
    return thread, lines


def busy(front: Front) -> bool:
    with front.http() as http:
        return "graphrunner_http_sequences 1.0" in http.get("/metrics").text


def test_a_killed_core_is_an_error_at_once_and_the_end_of_the_front(start: Callable[..., Front]) -> None:
    front = start()
    front.wait_ready()
    core = front.core_pid()
    thread, lines = open_stream(front)
    os.kill(core, signal.SIGKILL)
    killed_s = time.monotonic()
    thread.join(2)
    assert not thread.is_alive() and time.monotonic() - killed_s < 2
    events = [line for line in lines if line]
    assert '"the engine is not running"' in events[-2] and events[-1] == "data: [DONE]"
    assert front.end() == 1
    assert front.lines[-1] == "graphrunner: the engine core died: killed by SIGKILL (out of memory?)"
    assert "Traceback" not in front.text
    front.check_nothing_left(core)


def test_a_killed_core_comes_back_when_asked(start: Callable[..., Front]) -> None:
    front = start("--restart-engine", "--load-s", "0.2")
    front.wait_ready()
    thread, lines = open_stream(front)
    first = front.core_pid()
    os.kill(first, signal.SIGKILL)
    thread.join(2)
    assert '"the engine is not running"' in [line for line in lines if line][-2]
    with front.http() as http:
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        until(lambda: http.get("/health").status_code == 200, "it is ready again")
        assert http.post("/v1/completions", json={"prompt": "a"}).json()["choices"][0]["text"] == "Hello, world!"
        assert http.get("/metrics").status_code == 200
    second = front.core_pid()
    assert second != first and not is_running(first)
    front.process.send_signal(signal.SIGTERM)
    assert front.end() == 0
    front.check_nothing_left(first, second)


def test_steps_of_a_new_core_are_not_mixed_with_the_old_ones(start: Callable[..., Front]) -> None:
    front = start("--restart-engine", "--num-steps", "40")
    front.wait_ready()

    def shown(http: httpx.Client) -> list[int]:
        return [step["id"] for step in http.get("/debug/steps").json()["steps"]]

    with front.http() as http:
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
        until(lambda: len(shown(http)) == 45, "the steps of the first core are there")
        first = front.core_pid()
        os.kill(first, signal.SIGKILL)
        until(lambda: http.get("/health").status_code == 503, "it is gone")
        until(lambda: http.get("/health").status_code == 200, "another is ready")
        until(lambda: shown(http) == list(range(40)), "only the steps of the new core are there")
    second = front.core_pid()
    front.process.send_signal(signal.SIGTERM)
    assert front.end() == 0
    front.check_nothing_left(first, second)


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_killed_front_takes_its_core_along(start: Callable[..., Front], is_busy: bool) -> None:
    front = start()
    front.wait_ready()
    core = front.core_pid()
    if is_busy:
        open_stream(front)
    front.process.kill()
    front.process.wait(LIMIT_S)
    front.check_nothing_left(core)


def test_a_front_killed_while_the_core_loads(start: Callable[..., Front]) -> None:
    front = start("--load-s", "60")
    core = front.core_pid()
    until(lambda: not list(front.folder.glob("graphrunner-*")), "the core has connected")
    front.process.kill()
    front.process.wait(LIMIT_S)
    front.check_nothing_left(core)


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("delay_s", [0.1, 0.4, *(pytest.param(delay_s, marks=pytest.mark.slow) for delay_s in LATER)])
def test_a_signal_while_it_starts(start: Callable[..., Front], sig: signal.Signals, delay_s: float) -> None:
    """Wherever it is: importing, binding, starting the core, loading."""
    front = start("--load-s", "60")
    time.sleep(delay_s)
    children = psutil.Process(front.process.pid).children(recursive=True)
    front.process.send_signal(sig)
    front.end()
    front.check_nothing_left(*(child.pid for child in children))
    assert "graphrunner/" not in front.text and "tests/" not in front.text, "a traceback of ours"


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_ready_server(start: Callable[..., Front], sig: signal.Signals, is_busy: bool) -> None:
    front = start()
    front.wait_ready()
    core = front.core_pid()
    thread, lines = open_stream(front) if is_busy else (threading.Thread(), [])
    os.kill(core, sig)  # a service manager sends it to every process; the core leaves the decision to the front
    front.process.send_signal(sig)
    assert front.end() == 0 and "Traceback" not in front.text
    front.check_nothing_left(core)
    if is_busy:
        thread.join(5)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert any('"error"' in line for line in lines) is (sig is signal.SIGINT)


@pytest.mark.parametrize(
    ("fail", "reason"),
    [("/models/x: no such file or folder", "/models/x: no such file or folder"), ("memory", "not enough memory")],
)
def test_a_core_that_cannot_start_is_one_line(start: Callable[..., Front], fail: str, reason: str) -> None:
    front = start("--fail", fail)
    assert front.end() == 2
    assert len(front.lines) == 2 and front.lines[1].startswith(f"graphrunner: {reason}"), front.text
    front.check_nothing_left()


def test_a_core_killed_while_it_loads(start: Callable[..., Front]) -> None:
    front = start("--load-s", "60")
    core = front.core_pid()
    os.kill(core, signal.SIGKILL)
    assert front.end() == 2
    assert front.lines[-1].startswith("graphrunner: the engine core ended while it started: killed by SIGKILL")
    front.check_nothing_left(core)


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("graphrunner.entrypoints.cli.main", ["env"]),
        ("typer", ["env"]),
        ("torch", ["generate", "--prompt", "x"]),
        ("torch", ["chat"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_ctrl_c_ends_a_command_while_modules_load(module: str, command: list[str]) -> None:
    """Nothing is to be said or cleaned up; and parts of torch swallow a KeyboardInterrupt: the command would go on."""
    watch = f"""
import os, signal, sys
class Watch:
    def find_spec(self, name, *places):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)
            os._exit(7)
sys.meta_path.insert(0, Watch())
from graphrunner.entrypoints.cli.start import main
main()
"""
    process = subprocess.run(
        [sys.executable, "-c", watch, *command], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (process.returncode, process.stderr) == (-signal.SIGINT, "")
