"""A server under trial: started as a user starts it, watched from outside, stopped at the end."""

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).parent
MIB = 1 << 20
SERVE = (sys.executable, "-m", "graphrunner.entrypoints.cli.start", "serve", "--no-log-requests")
PACED = (sys.executable, str(HERE / "paced_front.py"))
"""The same front before a core that computes nothing."""
START_LIMIT_S = 300.0
RESULTS = HERE.parents[1] / "docs" / "benchmarks" / "reliability.json"


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def core(self) -> psutil.Process:
        return psutil.Process(self.process.pid).children()[0]

    def rss_bytes(self) -> int:
        """Memory of the front."""
        return psutil.Process(self.process.pid).memory_info().rss

    def post(self, path: str, body: object, timeout_s: float = 120.0) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str) -> float:
        found = re.search(rf"^{name} (\S+)$", self.get("/metrics")[1], re.M)
        return float(found[1]) if found else 0.0

    def text(self, prompt: str, num_tokens: int) -> str:
        """What the model says at temperature 0."""
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        status, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        return json.loads(answer)["choices"][0]["text"]

    def is_idle_and_whole(self) -> bool:
        """Nothing runs or waits, and no page is owned by a request."""
        names = ("graphrunner_requests_running", "graphrunner_requests_waiting", "graphrunner_kv_pages_used")
        return self.get("/health")[0] == 200 and all(
            self.metric(name) == 0 for name in (*names, "graphrunner_http_sequences")
        )

    def wait_idle(self, limit_s: float = 60.0) -> bool:
        return until(self.is_idle_and_whole, limit_s)


def until(is_true: Callable[[], bool], limit_s: float) -> bool:
    """Whether it became true in time."""
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(*options: str, program: Sequence[str] = SERVE) -> Iterator[Served]:
    """`graphrunner serve` with options, or another program that serves."""
    port, log = free_port(), Path(f"/tmp/graphrunner-reliability-{os.getpid()}.log")
    with log.open("w") as sink:
        process = subprocess.Popen([*program, "--port", str(port), *options], stderr=sink, stdout=sink)
    server = Served(process, port, log)
    try:
        is_up = until(lambda: process.poll() is not None or server.get("/health")[0] == 200, START_LIMIT_S)
        assert is_up and process.poll() is None, log.read_text()
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(30)


def machine() -> str:
    """This machine, in a line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.processor())
    memory_gib = psutil.virtual_memory().total / (1 << 30)
    return f"{model}, {psutil.cpu_count()} logical cores, {memory_gib:.0f} GiB, Python {platform.python_version()}"


def save(trial: str, setting: str, **figures: object) -> None:
    """Print a trial's figures and keep them in docs/benchmarks/reliability.json, with the machine and its load."""
    record = {"setting": setting, "machine": machine(), "load_before": round(psutil.getloadavg()[1], 1), **figures}
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[trial] = record
    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    print(trial, json.dumps(record, indent=1))
