"""kill -9 of the engine core under load: what clients hear and when, and what becomes of the server.

python benchmarks/reliability/killed_core.py [--num-clients 64]
"""

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

import psutil
from serving import Served, save, served, until
from stream_client import open_streams, read_all
from tiny_model import write_tiny_model

ENDED_LIMIT_S = 10.0


def kill_under_load(server: Served, num_clients: int) -> tuple[float, int, psutil.Process]:
    """(seconds until the last client had its error, clients that had a clean one, the core that was killed)."""
    body = {"max_tokens": 230, "ignore_eos": True, "temperature": 0, "stream": True}
    streams = open_streams(server.port, [{"prompt": f"Story {i}:", **body} for i in range(num_clients)])
    until(lambda: server.metric("graphrunner_requests_running") >= min(num_clients, 4), 60)
    core = server.core
    os.kill(core.pid, signal.SIGKILL)
    killed_s = time.perf_counter()
    read_all(streams, timeout_s=60)
    waited_s = time.perf_counter() - killed_s
    num_clean = sum(
        stream.is_complete and b"the engine is not running" in stream.body and b"Traceback" not in stream.body
        for stream in streams
    )
    return waited_s, num_clean, core


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-clients", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(Path(folder)))
        options = ("--model", model, "--num-threads", "1", "--max-num-seqs", "64")
        with served(*options) as server:
            waited_s, num_clean, core = kill_under_load(server, given.num_clients)
            start_s = time.perf_counter()
            is_over = until(lambda: server.process.poll() is not None, ENDED_LIMIT_S)
            front_s = time.perf_counter() - start_s
            exit_code = server.process.poll()
            is_core_gone = until(lambda: is_gone(core), ENDED_LIMIT_S)
            reason = server.log.read_text().strip().splitlines()[-1]
        with served(*options, "--restart-engine") as server:
            canary = server.text("The capital of France is", 4)
            restart_waited_s, restart_clean, _ = kill_under_load(server, given.num_clients)
            start_s = time.perf_counter()
            is_back = until(lambda: server.get("/health")[0] == 200, 120)
            back_s = time.perf_counter() - start_s
            is_same = server.text("The capital of France is", 4) == canary
    save(
        "killed_core",
        f"tiny random model; {given.num_clients} streams under way",
        num_clients=given.num_clients,
        num_clean_errors=num_clean,
        last_error_after_s=round(waited_s, 3),
        front_exit_code=exit_code,
        front_gone_after_s=round(front_s, 2),
        last_line=reason,
        restart_num_clean_errors=restart_clean,
        restart_last_error_after_s=round(restart_waited_s, 3),
        restart_ready_after_s=round(back_s, 1),
        restart_same_answer=is_same,
        holds=all((num_clean == given.num_clients, restart_clean == given.num_clients, is_over, exit_code == 1,
                   is_core_gone, is_back, is_same, waited_s < 2)),
    )  # fmt: skip


if __name__ == "__main__":
    main()
