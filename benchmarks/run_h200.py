"""Every row of the speed table on one H200, in under nine minutes.

    python benchmarks/run_h200.py [--only start,decode,prefill,offline,nano,replay,graph_gain,peer] [--out DIR]

Random weights, bf16, greedy, through `LLM.generate`. Each shape's measurements share one engine in a process of their
own. A process that dies is started again, once, from the measurement it was at and without prefill graphs, which its
rows then say beside the commit; one that dies again or overruns a limit costs that measurement, and the next ones go
on in a new process. Rows go into OUT/h200.json as they come, replacing rows of the same name, breakdowns into
OUT/h200_profile.json; so parts can be run one by one. `--merge DIR` takes in the two files of another folder and runs
nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from capture_time import cache_environment
from result_rows import ROOT, Row, current_commit, load_rows, merged, save_json, save_rows

HERE = Path(__file__).parent
PLAN = (
    ("start", ("8B",)),
    ("decode", ("8B", "0.6B", "1B")),
    ("prefill", ("8B", "0.6B")),
    ("offline", ("8B", "0.6B", "1B")),
    ("nano", ("0.6B",)),
    ("replay", ("8B", "0.6B", "1B")),
    ("graph_gain", ("0.6B", "8B")),
    ("peer", ("0.6B",)),
)
"""What is measured on which shapes, in the order of importance within a shape."""

LIMITS_S = {
    "start cold": 150, "start warm": 60, "build": 150, "ceilings": 90, "decode": 90, "prefill": 45, "offline": 60,
    "nano": 30, "replay": 60, "graph_gain": 100, "peer": 90,
}  # fmt: skip
"""Longest time of one task, by the first words of its name."""

ALONE = ("start", "graph_gain", "peer")
"""Tasks that are a process each."""
SAFER = "prefill_graph=off"
"""What a process that died is started again with: prefill graphs touch every measurement, and most can do without."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process: a shape's tasks that share an engine, or one that stands alone.

    Attributes:
        options: of the engine, NAME=VALUE.
    """

    shape: str
    tasks: tuple[str, ...]
    options: tuple[str, ...] = ()

    def command(self, rows: Path, device: str, cache: Path | None) -> list[str]:
        """The process to start."""
        options = [part for each in self.options for part in ("--engine", each)]
        shared = ["--device", device, "--rows", str(rows), *options]
        if self.tasks == ("start",):
            where = ["--cache", str(cache)] if cache else []
            return [sys.executable, "-u", str(HERE / "capture_time.py"), "--shapes", self.shape, *where, *shared]
        tasks = ",".join(self.tasks)
        return [sys.executable, "-u", str(HERE / "worker.py"), "--shape", self.shape, "--tasks", tasks, *shared]


def parts(wanted: Sequence[str], shapes: Sequence[str], options: Sequence[str] = ()) -> list[Part]:
    """Starts first (they leave a warm kernel cache), then one process a shape, then what needs engines of its own."""
    shapes_of = {task: [shape for shape in planned if shape in shapes] for task, planned in PLAN}
    if "tiny" in shapes:
        shapes_of = {task: ["tiny"] for task in shapes_of if task != "peer"}
    shapes_of = {task: shapes_of[task] for task in shapes_of if task in wanted}
    order = [shape for shape in ("8B", "0.6B", "1B", "tiny") if any(shape in each for each in shapes_of.values())]
    found = [Part(shape, ("start",), tuple(options)) for shape in shapes_of.get("start", [])]
    for shape in order:
        tasks = tuple(task for task, on in shapes_of.items() if task not in ALONE and shape in on)
        if tasks:
            found.append(Part(shape, tasks, tuple(options)))
    return found + [Part(shape, (task,), tuple(options)) for task in ALONE[1:] for shape in shapes_of.get(task, [])]


class Results:
    """The two files, written again whenever something new has come."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.rows_path, self.profile_path = folder / "h200.json", folder / "h200_profile.json"
        self.commit = commit
        self.rows = load_rows(self.rows_path)
        self.profile = json.loads(self.profile_path.read_text()) if self.profile_path.exists() else {}
        self.new_names: list[str] = []

    def take(self, rows: Sequence[Row], profile: dict) -> None:
        """Merge and save."""
        if rows:
            self.rows = merged(self.rows, rows)
            self.new_names += [row.name for row in rows]
            save_rows(self.rows_path, self.rows)
        if profile:
            self.profile |= profile
            save_json(self.profile_path, self.profile)

    def take_item(self, item: dict, options: Sequence[str]) -> None:
        """Take one line that a process appended to its file; options that are not the benchmark's own are marked."""
        commit = " ".join([self.commit, *options])
        if "row" in item:
            self.take([replace(Row(**item["row"]), commit=commit)], {})
        elif "profile" in item:
            self.take([], {name: value | {"commit": commit} for name, value in item["profile"].items()})

    def print_table(self) -> None:
        """This run's rows, and how many reach their mark."""
        new = [row for row in self.rows if row.name in self.new_names]
        print("\n" + "\n".join(str(row) for row in new))
        asked = [row for row in new if row.verdict]
        short = [row.name for row in asked if row.verdict == "fall short"]
        print(f"\n{len(asked) - len(short)} of {len(asked)} marks reached; fall short: {', '.join(short) or 'none'}")
        print(json.dumps([{"name": row.name, "value": row.value, "unit": row.unit} for row in new]))


class PartRun:
    """Watches one process: takes its rows, and ends it when a task overruns its limit.

    Args:
        deadline_s: of the whole run, on time.monotonic's clock.
    """

    def __init__(self, part: Part, results: Results, deadline_s: float, environment: dict[str, str]) -> None:
        self.part, self.results, self.deadline_s, self.environment = part, results, deadline_s, environment
        self.seen: list[str] = []
        self.is_overrun = False

    def run(self, device: str, cache: Path | None) -> tuple[bool, Part | None]:
        """Run the process; returns whether all went well, and what is still owed when it ended early."""
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.jsonl"
            rows.touch()
            command = self.part.command(rows, device, cache)
            with rows.open() as lines:
                process = subprocess.Popen(command, env=self.environment, cwd=ROOT, process_group=0)
                try:
                    self._watch(process, lines)
                finally:
                    _end(process)
                self._take(lines)
        return process.returncode == 0, None if process.returncode in (0, 1) else self._owed()

    def _watch(self, process: subprocess.Popen, lines) -> None:
        task_began_s = time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            if self._take(lines):
                task_began_s = time.monotonic()
            now_s, limit_s = time.monotonic(), self._limit_s()
            if now_s - task_began_s > limit_s or now_s > self.deadline_s:
                why = "the whole run's time is up" if now_s > self.deadline_s else f"over its limit of {limit_s} s"
                self.is_overrun = True
                print(f"!! {self.part.shape} {self.seen[-1] if self.seen else 'start'}: ended, {why}", flush=True)
                return

    def _take(self, lines) -> bool:
        """Take what has been appended; whether a new task began."""
        has_begun = False
        for line in _new_items(lines):
            if "task" in line:
                self.seen.append(line["task"])
                has_begun = True
            else:
                self.results.take_item(line, self.part.options)
        return has_begun

    def _limit_s(self) -> float:
        name = self.seen[-1] if self.seen else "ceilings"
        return next(limit for words, limit in LIMITS_S.items() if name.startswith(words))

    def _owed(self) -> Part | None:
        """The tasks from the one it died in, made safer; if that is done already, or time ran out, those after it."""
        part = self.part
        begun = [task for task in part.tasks if any(name.split()[0] == task for name in self.seen)]
        is_retried = not self.is_overrun and SAFER not in part.options and part.tasks[0] not in ALONE
        if is_retried:
            tasks = part.tasks[part.tasks.index(begun[-1]) :] if begun else part.tasks
            return replace(part, tasks=tasks, options=(*part.options, SAFER))
        # Ended before any had begun: the next try would end there too.
        tasks = part.tasks[part.tasks.index(begun[-1]) + 1 :] if begun else ()
        return replace(part, tasks=tasks) if tasks else None


def _new_items(lines) -> Iterator[dict]:
    """Whole lines that came since the last call."""
    while True:
        place = lines.tell()
        line = lines.readline()
        if not line.endswith("\n"):
            lines.seek(place)
            return
        yield json.loads(line)


def _end(process: subprocess.Popen) -> None:
    """End the process and all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(args: argparse.Namespace) -> int:
    """Run every part within the budget; 0 when all of them ended well."""
    results = Results(args.out, args.commit or current_commit())
    deadline_s = time.monotonic() + args.budget
    wanted, shapes = args.only.split(","), args.shapes.split(",")
    unknown = set(wanted) - {task for task, _ in PLAN}
    if unknown:
        sys.exit(f"--only: no such part: {', '.join(sorted(unknown))}; there are {', '.join(t for t, _ in PLAN)}")
    num_broken = 0
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache" if "start" in wanted else None
        environment = os.environ | {"PYTHONPATH": cache_environment(Path())["PYTHONPATH"]}
        queue = parts(wanted, shapes, args.engine)
        began_s = time.monotonic()
        while queue:
            part = queue.pop(0)
            print(
                f"\n== {part.shape}: {', '.join(part.tasks + part.options)}, at {time.monotonic() - began_s:.0f} s",
                flush=True,
            )
            if time.monotonic() > deadline_s - 15:
                print("!! not run: the whole run's time is up", flush=True)
                num_broken += 1
                continue
            is_fine, owed = PartRun(part, results, deadline_s, environment).run(args.device, cache)
            num_broken += not is_fine
            if owed:
                queue.insert(0, owed)
            if part.tasks == ("start",) and cache is not None:
                environment |= cache_environment(cache)
        results.print_table()
        print(f"\n{time.monotonic() - began_s:.0f} s", flush=True)
    return num_broken


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(task for task, _ in PLAN), help="parts, joined by commas")
    parser.add_argument("--shapes", default="8B,0.6B,1B", help="which shapes; tiny runs anywhere")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--budget", type=float, default=530, metavar="S", help="end by then, with what there is")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="an option of the engine")
    parser.add_argument("--commit", help="what the rows are marked with, where the checkout cannot say")
    parser.add_argument("--merge", type=Path, metavar="DIR", help="take in that folder's files and run nothing")
    args = parser.parse_args()
    if args.merge:
        other = Results(args.merge, "")
        Results(args.out, "").take(other.rows, other.profile)
        return
    sys.exit(1 if run(args) else 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    main()
