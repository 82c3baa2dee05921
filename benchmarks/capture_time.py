"""From the start of a process to its first token, phase by phase, kernel cache cold and warm; and capture.

    python benchmarks/capture_time.py [--shapes 8B] [--cache DIR]

Each start is a process of its own, timed from outside: interpreter, imports, weights, kernels, graphs, the first token
of a 32-token prompt. "Cold" has an empty folder for everything that is compiled or tuned; "warm" is the next process
on the same folder. "capture" is the recording of all default decode and prefill sizes in the warm start. "memory" is
what the card holds when it is ready, of the share that --gpu-memory-utilization allows. "phase_gap" is what the phase
table leaves unexplained of the warm start's time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from dummy_llm import build_llm, parse_options
from result_rows import ROOT, Row, RowSink
from shapes import ALL_SHAPES
from workload import prompt

PROMPT_LEN = 32
START_LIMIT_S = 140


def started(shape: str, device: str, options: list[str], cache: Path) -> dict:
    """Start one process and return its account: total_s, phases, graphs."""
    with tempfile.TemporaryDirectory() as folder:
        account = Path(folder) / "account.json"
        command = [sys.executable, __file__, "--child", str(account), "--shapes", shape, "--device", device]
        command += [part for option in options for part in ("--engine", option)]
        environment = os.environ | {"CAPTURE_TIME_STARTED_S": repr(time.time()), **cache_environment(cache)}
        subprocess.run(command, env=environment, check=True, timeout=START_LIMIT_S)
        return json.loads(account.read_text())


def cache_environment(cache: Path) -> dict[str, str]:
    """Where compiled kernels, tuned tables and compiled programs go, and the path to the package."""
    return {
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "GRAPHRUNNER_CACHE": str(cache / "graphrunner"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def measure(shape: str, device: str, options: list[str], cache: Path, sink: RowSink) -> None:
    """A cold start, then a warm one, as rows and as profiles."""
    for state in ("cold", "warm"):
        sink.task(f"start {state} {shape}")
        try:
            account = started(shape, device, options, cache)
        except subprocess.SubprocessError as error:
            print(f"   no first token: {error}", flush=True)
            continue
        sink.profile(f"start/{state}/{shape}", account)
        print_phases(account)
        sink.row(Row.of(f"start/{state}/{shape}", account["total_s"], "s"))
        if state == "warm":
            warm_rows(shape, account, sink)


def warm_rows(shape: str, account: Mapping, sink: RowSink) -> None:
    """What only a start with compiled kernels can say."""
    sink.row(Row.of(f"capture/{shape}", account["capture_s"], "s"))
    if account["limit_mib"]:
        sink.row(Row.of(f"start/memory/{shape}", 100 * account["used_mib"] / account["limit_mib"], "%"))
    gap_s = account["total_s"] - sum(account["phases_s"].values())
    sink.row(Row.of(f"start/phase_gap/{shape}", 100 * abs(gap_s) / account["total_s"], "%"))


def print_phases(account: Mapping) -> None:
    """The phase table, and what capture made."""
    for phase, seconds in account["phases_s"].items():
        memory = account["memory_mib"].get(phase, {"used": 0, "estimated": None})
        estimate = "" if memory["estimated"] is None else f", estimated {memory['estimated']} MiB"
        print(f"   {phase:36s} {seconds:7.2f} s {memory['used']:8d} MiB{estimate}")
    print(f"   {'together':36s} {sum(account['phases_s'].values()):7.2f} s of {account['total_s']:.2f} s")
    graphs = account["graphs"]
    print(
        f"   {len(graphs)} graphs, {account['num_failed']} failed, {account['capture_s']:.2f} s of recording",
        flush=True,
    )


def child(shape: str, device: str, options: dict[str, object], account: Path) -> None:
    """The process that is timed. Its account begins with the process and is the engine's own."""
    started_s = float(os.environ["CAPTURE_TIME_STARTED_S"])
    llm = build_llm(shape, device, options)
    built_s = time.time()
    from graphrunner import SamplingParams

    first = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate(prompt(PROMPT_LEN, 0, ALL_SHAPES[shape]["vocab_size"]), first, use_tqdm=False)
    ready_s = time.time()
    report = llm.graph_report()
    start = llm.startup_report()
    phases = {phase.name: phase.seconds for phase in start.phases} | {"first token": ready_s - built_s}
    graphs = [
        {
            "runner": each.runner, "num_tokens": each.key.num_tokens, "num_reqs": each.key.num_reqs,
            "variant": each.key.variant.value, "nodes": each.stats.num_nodes,
            "ms": round(each.stats.capture_ms, 3), "mib": round(each.stats.memory_bytes / 2**20, 2),
        }
        for each in report.keys
    ]  # fmt: skip
    result = {
        "total_s": ready_s - started_s,
        "phases_s": {name: round(seconds, 3) for name, seconds in phases.items()},
        "capture_s": sum(seconds for name, seconds in phases.items() if name.startswith("capture")),
        "memory_mib": {
            phase.name: {"used": _mib(phase.num_bytes), "estimated": _mib(phase.estimated_bytes)}
            for phase in start.phases
        },
        "limit_mib": _mib(start.limit_bytes),
        "used_mib": _mib(start.used_bytes),
        "num_failed": len(report.failed),
        "graphs": graphs,
    }
    account.write_text(json.dumps(result))
    llm.close()


def _mib(num_bytes: int | None) -> int | None:
    return None if num_bytes is None else num_bytes >> 20


def main() -> None:
    """Parse the command line; be the child when called as one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8B")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="an option of the engine")
    parser.add_argument(
        "--cache", type=Path, help="an empty folder to keep what is compiled in; default a temporary one"
    )
    parser.add_argument("--rows", type=Path, help="append rows here as they come")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.shapes, args.device, parse_options(args.engine), args.child)
        return
    for shape in args.shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            cache = args.cache or Path(folder)
            cache.mkdir(parents=True, exist_ok=True)
            assert args.cache is None or not any(cache.iterdir()), (
                f"--cache {cache} is not empty: no start would be cold"
            )
            measure(shape, args.device, args.engine, cache, RowSink(args.rows))


if __name__ == "__main__":
    main()
