"""The n-th call of a part fails: a server whose parts can be broken, a trial, and what must hold after it."""

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from graphrunner.config.engine_config import EngineConfig
from graphrunner.config.options import engine_config_from_options
from graphrunner.core.errors import GraphRunnerError
from graphrunner.engine.build import build_engine
from graphrunner.engine.model_runner import ModelRunner
from graphrunner.engine.token_engine import TokenEngine
from graphrunner.engine.tokenizer import load_tokenizer, source_of
from graphrunner.entrypoints.core_process import core_loop, link
from graphrunner.entrypoints.core_process.core_main import run_core
from graphrunner.entrypoints.core_process.launch import OnExit
from graphrunner.entrypoints.core_process.messages import CoreAddresses
from graphrunner.entrypoints.openai.async_engine import AsyncEngine
from graphrunner.entrypoints.openai.outbox import DirectProtocol
from graphrunner.entrypoints.openai.serve import ServerFailedError, ServerProcess
from graphrunner.entrypoints.openai.server_options import ServerOptions
from graphrunner.execution.recording import RecordingBackend
from graphrunner.kvcache.page_allocator import PageAllocator
from graphrunner.sampling.sampler import Sampler
from graphrunner.scheduler.scheduler import Scheduler
from graphrunner.tokenizer.detokenizer import IncrementalDetokenizer
from graphrunner.tokenizer.tokenizer import Tokenizer

ANSWER_LIMIT_S = 20.0
CANARY = {"prompt": "canary", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


class Scope(Enum):
    """How far a failure may reach."""

    REQUEST = "some requests end with an error; the engine goes on"
    ENGINE = "the engine ends, and every client hears of it"
    EITHER = "the one or the other, by what was to be sent"


PLACES: dict[str, tuple[object, str, Scope]] = {
    "page allocation": (PageAllocator, "allocate", Scope.REQUEST),
    "scheduling": (Scheduler, "schedule", Scope.REQUEST),
    "load, replay, sample": (ModelRunner, "forward", Scope.REQUEST),
    "sampling": (Sampler, "sample", Scope.REQUEST),
    "admission": (TokenEngine, "add_request", Scope.REQUEST),
    "tokenizing": (Tokenizer, "encode", Scope.REQUEST),
    "spelling a token": (IncrementalDetokenizer, "append_one", Scope.REQUEST),
    "spelling a steady token": (IncrementalDetokenizer, "whole_text_of", Scope.REQUEST),
    "writing to a client": (DirectProtocol, "_write_body", Scope.REQUEST),
    "front sends": (link.CoreLink, "send", Scope.EITHER),
    "front receives": (link, "decode_report", Scope.ENGINE),
    "core sends": (core_loop.CoreLoop, "_report", Scope.ENGINE),
    "core receives": (core_loop, "decode_command", Scope.ENGINE),
}
CAPTURE = (RecordingBackend, "capture_one")


class InjectedError(Exception):
    """What a part that was made to fail raises."""


@dataclass
class Injection:
    """Counts the calls of a part."""

    nth: int
    num_calls: int = 0

    @property
    def has_failed(self) -> bool:
        return self.num_calls >= self.nth


@contextmanager
def failing(owner: object, name: str, nth: int, error: type[Exception] = InjectedError) -> Iterator[Injection]:
    """Inside, the nth call of `owner.name` raises; calls before and after it do what they always do."""
    real = getattr(owner, name)
    injection = Injection(nth)

    def counted(*args: object, **options: object) -> object:
        injection.num_calls += 1
        if injection.num_calls == nth:
            raise error(f"call {nth} of {name}")
        return real(*args, **options)

    setattr(owner, name, counted)
    try:
        yield injection
    finally:
        setattr(owner, name, real)


def config_of(folder: Path) -> EngineConfig:
    """A small engine that records graphs."""
    return engine_config_from_options(
        {"model": str(folder), "max_num_seqs": 4, "num_pages": 64, "max_model_len": 128, "num_threads": 1,
         "decode_graph": "recording", "decode_sizes": (1, 2, 4)}
    )  # fmt: skip


class _ThreadCore:
    """A core on a thread, so that its parts can be reached."""

    def __init__(self, tried: "Tried", addresses: CoreAddresses, on_exit: OnExit) -> None:
        def build() -> TokenEngine:
            tried.engine = build_engine(tried.config).token_engine
            return tried.engine

        def run() -> None:
            try:
                reason = run_core(build, addresses)
            except Exception as error:
                reason = str(error)
            on_exit("exit code 0" if reason is None else "exit code 1")

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    async def stop(self, grace_s: float) -> None:
        deadline_s = time.monotonic() + grace_s
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.002)


@dataclass
class Tried:
    """A server under trial."""

    config: EngineConfig
    engine: TokenEngine | None = None
    url: str = ""
    failure: GraphRunnerError | ServerFailedError | None = None
    thread: threading.Thread | None = None
    is_ready: threading.Event = field(default_factory=threading.Event)
    _process: ServerProcess | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    def post(self, path: str, body: dict[str, object]) -> tuple[int, bytes]:
        """Status and body; 0 when the connection broke, -1 when nothing came in time."""
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except TimeoutError:
            return -1, b""
        except OSError as error:
            return (-1 if "timed out" in str(error) else 0), b""

    def canary(self) -> str:
        status, answer = self.post("/v1/completions", CANARY)
        return json.loads(answer)["choices"][0]["text"] if status == 200 else f"status {status}"

    def is_whole(self) -> bool:
        """At idle: every page is free or cached and has one owner, and nothing is live."""
        assert self.engine is not None
        scheduler = self.engine.core.scheduler
        deadline_s = time.monotonic() + 10
        while self.engine.has_unfinished_requests() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        scheduler.check_invariants()
        stats = scheduler.stats()
        return (stats.num_running, stats.num_waiting, stats.num_used_pages) == (0, 0, 0)

    def is_alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive() and self.failure is None and self._health() == 200

    def ends(self, limit_s: float = 15.0) -> bool:
        """Whether the server leaves by itself."""
        assert self.thread is not None
        self.thread.join(limit_s)
        return not self.thread.is_alive()

    def stop(self) -> None:
        if self.thread is not None and self.thread.is_alive():
            assert self._loop is not None and self._process is not None
            self._loop.call_soon_threadsafe(self._process.request_stop)
            self.thread.join(15)

    def _health(self) -> int:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


def start_tried(config: EngineConfig) -> Tried:
    """Start one; returns when it is ready or has failed."""
    tried = Tried(config)
    is_listening = threading.Event()
    tokenizer: Callable[[], Tokenizer | None] = lambda: load_tokenizer(config.load, source_of(config.load))  # noqa: E731

    def listening(url: str) -> None:
        tried.url = url
        is_listening.set()

    def run() -> None:
        loop = tried._loop = asyncio.new_event_loop()
        tried._process = ServerProcess(
            lambda on_death: AsyncEngine(
                lambda addresses, on_exit: _ThreadCore(tried, addresses, on_exit), tokenizer, on_death=on_death
            ),
            ServerOptions(port=0, log_requests=False),
            on_listening=listening,
            on_ready=tried.is_ready.set,
        )
        try:
            loop.run_until_complete(tried._process.run())
        except ServerFailedError as error:
            tried.failure = error
        finally:
            loop.close()

    tried.thread = threading.Thread(target=run, daemon=True)
    tried.thread.start()
    assert is_listening.wait(30)
    deadline_s = time.monotonic() + 60
    while not tried.is_ready.is_set() and tried.thread.is_alive():
        assert time.monotonic() < deadline_s, "the server neither started nor ended"
        time.sleep(0.005)
    return tried


def workload(tried: Tried) -> list[tuple[int, bytes]]:
    """Five requests at once: streamed and not, with several outputs and a stop string, chat, an embedding."""
    jobs = [
        ("/v1/completions", {**CANARY, "stream": True, "max_tokens": 12}),
        ("/v1/completions", {"prompt": "a" * 40, "max_tokens": 6, "n": 2, "stop": ["zz"], "ignore_eos": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "stream": True}),
        ("/v1/completions", {"prompt": ["b", "c"], "max_tokens": 5, "temperature": 0.8, "logprobs": 1}),
        ("/v1/embeddings", {"input": "abc"}),
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: tried.post(*job), jobs))


def problems_of(answers: list[tuple[int, bytes]], scope: Scope) -> list[str]:
    """Answers that are neither whole nor clean errors. A server that is going may not take a connection any more."""
    found = []
    for status, body in answers:
        is_stream = body.startswith(b"data: ")
        is_clean = status in (200, 400, 500, 503) and (not is_stream or body.endswith(b"data: [DONE]\n\n"))
        is_clean = is_clean or (status == 0 and scope is not Scope.REQUEST)
        if not is_clean or b"Traceback" in body or b"InjectedError" in body:
            found.append(f"{status}: {body[-200:]!r}")
    return found


def trial(tried: Tried, place: str, nth: int) -> tuple[Injection, list[str]]:
    """Let the nth call of a place fail under the workload; the injection, and what was wrong."""
    owner, name, scope = PLACES[place]
    before = tried.canary()
    with failing(owner, name, nth) as injection:
        answers = workload(tried)
        wrong = problems_of(answers, scope)
        has_ended = scope is not Scope.REQUEST and injection.has_failed and not tried.is_alive()
        if (has_ended or (scope is Scope.ENGINE and injection.has_failed)) and not tried.ends():
            wrong.append("the engine's end did not end the server")
    if not injection.has_failed and any(status != 200 for status, _ in answers):
        wrong.append(f"nothing failed, yet {[status for status, _ in answers]}")
    if scope is Scope.REQUEST or not injection.has_failed or (scope is Scope.EITHER and tried.failure is None):
        if not tried.is_alive():
            return injection, [*wrong, "the server has gone"]
        if (after := tried.canary()) != before:
            wrong.append(f"the canary says {after!r}, not {before!r}")
        if not tried.is_whole():
            wrong.append("the pool is not whole")
    elif tried.failure is None or tried.failure.exit_code != 1:
        wrong.append(f"the server ended with {tried.failure!r}")
    return injection, wrong
