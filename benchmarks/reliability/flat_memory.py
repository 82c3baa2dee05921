"""Twenty thousand short requests, half of them streamed; the memory of both processes must stay where it was.

python benchmarks/reliability/flat_memory.py [--num-requests 20000] [--num-warm-up 8000]
"""

import argparse
import tempfile
from pathlib import Path

from quick_client import send_all
from serving import MIB, Served, save, served
from tiny_model import write_tiny_model

LIMIT_MIB = 5.0


def bodies(first: int, count: int) -> list[dict[str, object]]:
    """Prompts that differ, so that the prefix cache fills and evicts."""
    return [
        {"prompt": f"{i:08d} is a number", "max_tokens": 2, "ignore_eos": True, "stream": i % 2 == 0}
        for i in range(first, first + count)
    ]


def memory_mib(server: Served) -> tuple[float, float]:
    return server.rss_bytes() / MIB, server.core.memory_info().rss / MIB


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-requests", type=int, default=20_000)
    parser.add_argument("--num-warm-up", type=int, default=8_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(Path(folder)))
        with served("--model", model, "--num-threads", "1", "--max-num-seqs", "32", "--num-pages", "512") as server:
            send_all(server.port, bodies(0, given.num_warm_up))
            before = memory_mib(server)
            answers = send_all(server.port, bodies(given.num_warm_up, given.num_requests))
            after = memory_mib(server)
            growth = [round(now - then, 2) for now, then in zip(after, before, strict=True)]
            num_failed = sum(status != 200 for status, _ in answers)
            save(
                "flat_memory",
                f"tiny random model; {given.num_requests} requests of 2 tokens after {given.num_warm_up} of warm-up",
                num_requests=given.num_requests,
                num_failed=num_failed,
                front_growth_mib=growth[0],
                core_growth_mib=growth[1],
                front_mib=round(after[0]),
                is_pool_whole=server.wait_idle(),
                holds=num_failed == 0 and max(growth) <= LIMIT_MIB,
            )


if __name__ == "__main__":
    main()
