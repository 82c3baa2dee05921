"""The real front before a paced core: `graphrunner serve` without a model.

python benchmarks/reliability/paced_front.py --port 8001 --step-ms 20 [--written FILE] [--profile FILE]
"""

import argparse
import cProfile
import sys
import time
from collections.abc import Callable
from pathlib import Path

from graphrunner.config.engine_config import EngineConfig, LoadConfig
from graphrunner.engine.tokenizer import load_tokenizer, source_of
from graphrunner.entrypoints.cli.serve import run_server
from graphrunner.entrypoints.core_process.launch import launcher
from graphrunner.entrypoints.core_process.messages import News
from graphrunner.entrypoints.openai.async_engine import AsyncEngine
from graphrunner.entrypoints.openai.outbox import DirectProtocol
from graphrunner.entrypoints.openai.server_options import ServerOptions

ENGINE = Path(__file__).with_name("paced_engine.py")


def note_writes(path: Path) -> Callable[[], None]:
    """Log, for every piece of a stream, how long after the step's message it went out; returns the saver.

    One line a piece: wall seconds, and seconds of this thread's own work.
    """
    lines: list[tuple[float, float]] = []
    heard = (0.0, 0.0)
    write_body, take_news = DirectProtocol._write_body, AsyncEngine._take_news

    def timed_write(self: DirectProtocol, data: bytes) -> bool:
        is_out = write_body(self, data)
        lines.append((time.perf_counter() - heard[0], time.thread_time() - heard[1]))
        return is_out

    def timed_news(self: AsyncEngine, news: News) -> None:
        nonlocal heard
        heard = (time.perf_counter(), time.thread_time())
        take_news(self, news)

    DirectProtocol._write_body, AsyncEngine._take_news = timed_write, timed_news  # type: ignore[method-assign]
    return lambda: path.write_text("\n".join(f"{wall!r} {own!r}" for wall, own in lines)) and None


def serve(arguments: argparse.Namespace) -> None:
    config = EngineConfig(load=LoadConfig())
    command = [sys.executable, str(ENGINE), "--step-ms", str(arguments.step_ms)]
    if arguments.times:
        command += ["--times", str(arguments.times)]

    options = ServerOptions(port=arguments.port, log_requests=False, max_concurrent_requests=4096)
    run_server(launcher(config, command), lambda: load_tokenizer(config.load, source_of(config.load)), options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--times", type=Path, help="see paced_engine.py")
    parser.add_argument("--written", type=Path, help="write when each piece of a stream went out")
    parser.add_argument("--profile", type=Path, help="write a profile of the front")
    given = parser.parse_args()
    save = note_writes(given.written) if given.written else lambda: None
    if given.profile:
        with cProfile.Profile() as profile:
            serve(given)
        profile.dump_stats(given.profile)
    else:
        serve(given)
    save()
