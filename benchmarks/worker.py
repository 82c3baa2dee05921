"""Runs measurements of one shape in one process: one engine for all that share it, failures kept apart.

    python benchmarks/worker.py --shape 8B --tasks decode,prefill,offline,replay [--rows FILE]

`run_h200.py` starts it; the scripts of single measurements go through it too.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from benched_engine import BenchedEngine
from ceilings import Ceilings, measure_ceilings
from decode_step import decode_rows
from dummy_llm import build_llm, parse_options
from offline import fixed_rows, offline_rows, peer_rows
from prefill_step import graph_gain_rows, prefill_rows
from replay_profile import replay_rows
from result_rows import Row, RowSink, current_commit
from workload import FULL, TINY, Workload

ENGINE_TASKS = ("decode", "prefill", "nano", "offline", "replay")
"""They share one engine; `replay` comes last because it works below the engine's own account."""
OWN_TASKS = ("graph_gain", "peer")
BROKEN_DEVICE, NO_ENGINE = 3, 4
"""Exit codes of a process that cannot go on; 1 is a task that failed while the others ran."""


class Measurement:
    """The tasks of one shape.

    Args:
        options: of the engine, on top of the benchmark's own.
        sink: takes the rows.
    """

    def __init__(self, shape: str, device: str, options: dict[str, object], sink: RowSink) -> None:
        self.shape, self.device, self.options, self.sink = shape, device, options, sink
        self.workload: Workload = TINY if shape == "tiny" else FULL
        self.ceilings: Ceilings | None = None
        self.bench: BenchedEngine | None = None

    def run(self, task: str) -> Iterator[Row]:
        """The rows of one task; builds the engine when it is the first to need it."""
        ceilings = self._measured_ceilings()
        if task in ENGINE_TASKS:
            bench = self._engine(ceilings)
            self.sink.task(f"{task} {self.shape}")
            yield from self._engine_rows(task, bench)
            return
        self.sink.task(f"{task} {self.shape}")
        if task == "peer":
            yield from peer_rows(self.shape, self.device, self.workload)
        else:
            yield from graph_gain_rows(self.shape, self.device, self.workload, ceilings, self.options)

    def _engine_rows(self, task: str, bench: BenchedEngine) -> Iterator[Row]:
        profiled = {"replay": replay_rows, "prefill": prefill_rows, "offline": offline_rows}
        if task in profiled:
            return profiled[task](bench, self.sink)
        return {"decode": decode_rows, "nano": fixed_rows}[task](bench)

    def _measured_ceilings(self) -> Ceilings:
        if self.ceilings is None:
            self.sink.task(f"ceilings {self.shape}")
            if self.device == "cpu":
                torch.set_num_threads(1)
            self.ceilings = measure_ceilings(self.device)
            self.sink.row(Row.of("ceiling/read", self.ceilings.read_bytes_per_s / 1e12, "TB/s"))
            self.sink.row(Row.of("ceiling/matmul", self.ceilings.flops_per_s / 1e12, "TFLOP/s"))
        return self.ceilings

    def _engine(self, ceilings: Ceilings) -> BenchedEngine:
        if self.bench is None:
            self.sink.task(f"build {self.shape}")
            start_s = time.perf_counter()
            try:
                llm = build_llm(self.shape, self.device, self.options)
            except Exception:  # no task of this process can do without
                traceback.print_exc()
                sys.exit(NO_ENGINE)
            report = llm.graph_report()
            print(f"   {len(report.keys)} graphs, {len(report.failed)} failed, {time.perf_counter() - start_s:.1f} s")
            for runner, key, cause in report.failed[:3]:
                print(f"   {runner} {key}: {cause}")
            self.bench = BenchedEngine(llm, self.shape, self.device, self.workload, ceilings)
        return self.bench


def run_tasks(measurement: Measurement, tasks: Sequence[str]) -> int:
    """Run every task, whatever becomes of the others; how many failed."""
    num_failed = 0
    for task in tasks:
        try:
            for row in measurement.run(task):
                measurement.sink.row(row)
        except Exception:
            traceback.print_exc()
            num_failed += 1
            if _is_device_broken(measurement.device):
                print("the device is of no more use to this process", flush=True)
                sys.exit(BROKEN_DEVICE)
    return num_failed


def run_alone(description: str | None, tasks: Sequence[str], has_peer: bool = False) -> None:
    """The command line of one measurement: rows as they come, and all of them as one JSON line."""
    parser = _parser(description)
    parser.add_argument("--shapes", default="0.6B,1B,8B", help="comma-separated: 0.6B, 1B, 8B, tiny")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    if has_peer:
        parser.add_argument("--peer", choices=["transformers"], help="measure this engine too, on the smallest shape")
    args = parser.parse_args()
    rows: list[Row] = []

    class KeepingSink(RowSink):
        def row(self, row: Row) -> None:
            super().row(row)
            rows.append(row)

    num_failed, commit = 0, current_commit()
    shapes = args.shapes.split(",")
    for shape in shapes:
        wanted = [*tasks, "peer"] if has_peer and args.peer and shape == shapes[0] else tasks
        measurement = Measurement(shape, args.device, parse_options(args.engine), KeepingSink(None))
        num_failed += run_tasks(measurement, wanted)
        if measurement.bench is not None:
            measurement.bench.llm.close()
    text = json.dumps([asdict(row) | {"commit": commit} for row in rows])
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    sys.exit(1 if num_failed else 0)


def main() -> None:
    """One shape, its tasks in the order given."""
    parser = _parser(__doc__)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--tasks", required=True, help=f"comma-separated: {', '.join(ENGINE_TASKS + OWN_TASKS)}")
    parser.add_argument("--rows", type=Path, help="append rows here as they come")
    args = parser.parse_args()
    measurement = Measurement(args.shape, args.device, parse_options(args.engine), RowSink(args.rows))
    sys.exit(1 if run_tasks(measurement, args.tasks.split(",")) else 0)


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="an option of the engine")
    return parser


def _is_device_broken(device: str) -> bool:
    """After a kernel has faulted, every later call of the process fails."""
    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    main()
