"""Clients as they are: a thousand that leave at any moment, slow readers, half-open connections; clocks that jump.

python benchmarks/reliability/rough_clients.py [--num-aborts 1000] [--num-slow 200] [--num-half-open 200]
"""

import argparse
import random
import select
import socket
import sys
import tempfile
import time
from pathlib import Path

from serving import HERE, Served, save, served
from stream_client import open_streams, read_all, request_bytes
from tiny_model import write_tiny_model

CANARY = ("canary", 8)
GROUP = 50  # clients at once


def abort_some(server: Served, count: int, rng: random.Random) -> int:
    """Connect, ask (sometimes for several outputs), and leave before, during or after the answer; how many left."""
    for start in range(0, count, GROUP):
        socks = []
        for _ in range(min(GROUP, count - start)):
            body = {"prompt": "a" * rng.randrange(1, 60), "max_tokens": rng.randrange(1, 150), "ignore_eos": True,
                    "n": rng.choice([1, 1, 3]), "stream": rng.random() < 0.7}  # fmt: skip
            sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            raw = request_bytes(body)
            is_cut = rng.random() < 0.1
            sock.sendall(raw[: rng.randrange(1, len(raw))] if is_cut else raw)
            socks.append((sock, rng.random() * 0.5))
        start_s = time.monotonic()
        for sock, leave_s in sorted(socks, key=lambda each: each[1]):
            time.sleep(max(0.0, start_s + leave_s - time.monotonic()))
            if rng.random() < 0.5:  # with unread data in the socket, closing is a reset
                select.select([sock], [], [], 0.0)
            sock.close()
    return count


def read_slowly(server: Served, count: int, pause_s: float = 3.0) -> int:
    """Streams nobody reads for a while, then all at once; how many came whole."""
    body = {"prompt": "slow", "max_tokens": 30, "ignore_eos": True, "stream": True}
    streams = open_streams(server.port, [body] * count)
    for stream in streams:
        stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    answered_s = time.monotonic()
    server.text(*CANARY)  # an ordinary client meanwhile
    print(f"an ordinary client beside {count} slow readers waited {time.monotonic() - answered_s:.2f} s")
    time.sleep(pause_s)
    read_all(streams)
    return sum(stream.is_complete and len("".join(stream.texts())) > 0 for stream in streams)


def leave_half_open(server: Served, count: int) -> list[socket.socket]:
    """Connections on which a request was begun and never goes on."""
    raw = request_bytes({"prompt": "never", "max_tokens": 5})
    socks = []
    for index in range(count):
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        sock.sendall(raw[: index % len(raw)])
        socks.append(sock)
    return socks


def is_closed(sock: socket.socket) -> bool:
    """Whether the server has given the connection up, with or without an answer before."""
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
        return True
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def jump_clock(command: list[str]) -> None:
    """Run the server's command with a wall clock that leaps back and forth by days."""
    real = time.time
    rng = random.Random(7)
    time.time = lambda: real() + rng.uniform(-3e6, 3e6)  # type: ignore[method-assign]
    sys.argv = command
    from graphrunner.entrypoints.cli.start import main

    main()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-aborts", type=int, default=1000)
    parser.add_argument("--num-slow", type=int, default=200)
    parser.add_argument("--num-half-open", type=int, default=200)
    given = parser.parse_args()
    rng = random.Random(11)
    program = [sys.executable, str(HERE / "rough_clients.py"), "--serve-with-jumping-clock", "serve"]
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(Path(folder)))
        options = (
            "--model",
            model,
            "--num-threads",
            "1",
            "--max-num-seqs",
            "64",
            "--num-pages",
            "600",
            "--body-timeout-s",
            "5",
        )
        with served(*options, "--no-log-requests", program=program) as server:
            canary = server.text(*CANARY)
            pages = server.metric("graphrunner_kv_pages")
            num_aborts = abort_some(server, given.num_aborts, rng)
            is_whole_after_aborts = server.wait_idle()
            num_slow_whole = read_slowly(server, given.num_slow)
            half_open = leave_half_open(server, given.num_half_open)
            is_serving_beside = server.text(*CANARY) == canary
            time.sleep(8)
            num_given_up = sum(is_closed(sock) for sock in half_open)
            for sock in half_open:
                sock.close()
            is_whole = server.wait_idle()
            is_same = server.text(*CANARY) == canary and server.metric("graphrunner_kv_pages") == pages
            save(
                "rough_clients",
                "tiny random model; the front's wall clock leaps by days at every reading",
                num_aborts=num_aborts,
                is_pool_whole_after_aborts=is_whole_after_aborts,
                num_slow_readers=given.num_slow,
                num_slow_readers_whole=num_slow_whole,
                num_half_open=given.num_half_open,
                num_half_open_closed_by_server=num_given_up,
                is_served_beside_half_open=is_serving_beside,
                is_pool_whole=is_whole,
                is_canary_same=is_same,
                is_front_alive=server.process.poll() is None,
                holds=all(
                    (is_whole_after_aborts, num_slow_whole == given.num_slow, is_serving_beside, is_whole, is_same)
                ),
            )


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--serve-with-jumping-clock":
        jump_clock(["graphrunner", *sys.argv[2:]])
    else:
        main()
