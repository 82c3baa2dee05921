"""The real front before a paced core: `graphrunner serve` without a model.

python benchmarks/reliability/paced_front.py --port 8001 --step-ms 20 [--steps FILE] [--profile FILE]
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
from graphrunner.entrypoints.openai.server_options import ServerOptions

ENGINE = Path(__file__).with_name("paced_engine.py")


def note_steps(path: Path) -> Callable[[], None]:
    """Log, for every step, how long after its message the last of its tokens was out; returns the saver.

    One line a step: tokens, wall seconds, seconds of this thread's own work.
    """
    lines: list[str] = []
    take_news = AsyncEngine._take_news

    def timed_news(self: AsyncEngine, news: News) -> None:
        wall_s, own_s = time.perf_counter(), time.thread_time()
        take_news(self, news)
        wall_s, own_s = time.perf_counter() - wall_s, time.thread_time() - own_s
        lines.append(f"{len(news.outputs)} {wall_s!r} {own_s!r}")

    AsyncEngine._take_news = timed_news  # type: ignore[method-assign]
    return lambda: path.write_text("\n".join(lines)) and None


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
    parser.add_argument("--steps", type=Path, help="write how long the tokens of each step took to go out")
    parser.add_argument("--profile", type=Path, help="write a profile of the front")
    given = parser.parse_args()
    save = note_steps(given.steps) if given.steps else lambda: None
    if given.profile:
        with cProfile.Profile() as profile:
            serve(given)
        profile.dump_stats(given.profile)
    else:
        serve(given)
    save()
