"""The benchmark of the GPU runs end to end on a tiny shape, keeps what it has, and goes on after a failure."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from marks import MARKS
from result_rows import Row, RowSink, load_rows, merged, save_rows, sort_key
from run_h200 import PLAN, SAFER, Part, PartRun, Results, parts
from worker import Measurement, run_tasks
from workload import FULL

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def threads_restored() -> Iterator[None]:
    """The tiny shape runs on one thread, which is nobody else's business."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def _run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/run_h200.py", "--device", "cpu", "--shapes", "tiny", "--out", str(out)]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def test_one_command_runs_a_part_and_saves_it(tmp_path: Path) -> None:
    done = _run(tmp_path, "--only", "nano", "--commit", "abc")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = load_rows(tmp_path / "h200.json")
    assert {row.name for row in rows} == {"nano/tiny/batch1", "nano/tiny/batch4", "ceiling/read", "ceiling/matmul"}
    assert {row.commit for row in rows} == {"abc"}
    assert all(row.name in done.stdout for row in rows)


def test_every_task_runs_on_a_tiny_shape(tmp_path: Path, threads_restored: None) -> None:
    file = tmp_path / "rows.jsonl"
    measurement = Measurement("tiny", "cpu", {}, RowSink(file))
    assert run_tasks(measurement, ["decode", "prefill", "nano", "offline", "replay", "graph_gain"]) == 0
    items = [json.loads(line) for line in file.read_text().splitlines()]
    rows = {item["row"]["name"] for item in items if "row" in item}
    expected = {"decode/tiny/batch1", "bare/tiny/batch4", "host_share/tiny", "ttft/tiny", "prefill4/tiny"}
    assert expected | {"offline/tiny", "nano/tiny/batch4", "small_prefill/tiny/8", "ceiling/read"} <= rows
    profiles = {name: value for item in items for name, value in item.get("profile", {}).items()}
    for name in ("decode/tiny/batch1", "prefill/tiny/1x24"):
        assert profiles[name]["kernels"], "a step consists of something"


def test_parts_of_two_runs_end_up_in_one_file(tmp_path: Path) -> None:
    old = [Row("decode/8B/batch1", 5.0, "ms"), Row("offline/8B", 9000.0, "tokens/s")]
    save_rows(tmp_path / "a" / "h200.json", old)
    save_rows(tmp_path / "b" / "h200.json", [Row("decode/8B/batch1", 4.0, "ms")])
    done = _run(tmp_path / "a", "--merge", str(tmp_path / "b"))
    assert done.returncode == 0, done.stderr
    assert {row.name: row.value for row in load_rows(tmp_path / "a" / "h200.json")} == {
        "decode/8B/batch1": 4.0,
        "offline/8B": 9000.0,
    }


def test_a_process_that_dies_twice_costs_one_task(tmp_path: Path, monkeypatch) -> None:
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, sys\n"
        "with open(sys.argv[1], 'a') as rows:\n"
        '    rows.write(\'{"task": "build tiny"}\\n{"task": "decode tiny"}\\n\')\n'
        '    rows.write(\'{"row": {"name": "decode/tiny/batch1", "value": 1.0, "unit": "ms"}}\\n{"ro\')\n'
        "os.abort()\n"
    )
    monkeypatch.setattr(Part, "command", lambda self, rows, *rest: [sys.executable, str(script), str(rows)])
    results = Results(tmp_path / "out", "abc")
    first = Part("tiny", ("decode", "offline", "nano"))
    is_fine, second = PartRun(first, results, float("inf"), dict(os.environ)).run("cpu", None)
    assert not is_fine and second == Part("tiny", first.tasks, (SAFER,)), "once more, without what may be the cause"
    is_fine, third = PartRun(second, results, float("inf"), dict(os.environ)).run("cpu", None)
    assert not is_fine and third == Part("tiny", ("offline", "nano"), (SAFER,)), "then on without the task"
    rows = load_rows(tmp_path / "out" / "h200.json")
    assert [(row.name, row.commit) for row in rows] == [("decode/tiny/batch1", f"abc {SAFER}")]


def test_a_task_over_its_limit_is_ended(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("run_h200.LIMITS_S", {"ceilings": 0.2})
    monkeypatch.setattr(
        Part, "command", lambda self, rows, *rest: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    results = Results(tmp_path, "abc")
    run = PartRun(Part("tiny", ("decode",)), results, float("inf"), dict(os.environ))
    assert run.run("cpu", None) == (False, None), "nothing is owed when no task had begun"


def test_the_plan_measures_every_mark() -> None:
    measured = {"start/phase_gap/8B", "start/memory/8B", "capture/8B"}
    for task, shapes in PLAN:
        for shape in shapes:
            measured |= {
                "start": {f"start/cold/{shape}", f"start/warm/{shape}"},
                "decode": {f"decode/{shape}/batch{batch}" for batch in FULL.batches},
                "prefill": {f"ttft/{shape}", f"prefill{FULL.batches[-1]}/{shape}"},
                "offline": {f"offline/{shape}"},
                "nano": {f"nano/{shape}/batch{batch}" for batch in FULL.batches},
                "replay": {f"host_share/{shape}"},
                "graph_gain": {f"small_prefill/{shape}/{n}" for n in (*FULL.small_prompts, *FULL.larger_prompts)},
                "peer": set(),
            }[task]
    assert set(MARKS) <= measured


def test_starts_come_first_and_a_shape_shares_one_engine() -> None:
    found = parts([task for task, _ in PLAN], ["8B", "0.6B", "1B"])
    assert found[0] == Part("8B", ("start",))
    assert found[1] == Part("8B", ("decode", "prefill", "offline", "replay"))
    assert found[-1] == Part("0.6B", ("peer",))


def test_verdicts() -> None:
    assert Row.of("decode/8B/batch1", 3.6, "ms", 3.44).verdict == "aim"
    assert Row.of("decode/8B/batch1", 3.9, "ms").verdict == "pass"
    assert Row.of("decode/8B/batch1", 4.0, "ms").verdict == "fall short"
    assert Row.of("offline/8B", 11_499, "tokens/s").verdict == "fall short"
    assert Row.of("offline/8B", 14_000, "tokens/s").verdict == "aim"
    assert Row.of("bare/8B/batch1", 3.6, "ms", 1.8).verdict == ""
    assert Row.of("bare/8B/batch1", 3.6, "ms", 1.8).floor_share == 0.5


def test_rows_sort_by_number_and_replace_by_name() -> None:
    names = ["decode/8B/batch16", "decode/8B/batch4", "decode/0.6B/batch1"]
    assert sorted(names, key=sort_key) == ["decode/0.6B/batch1", "decode/8B/batch4", "decode/8B/batch16"]
    assert merged([Row("a", 1.0, "ms")], [Row("a", 2.0, "ms")]) == [Row("a", 2.0, "ms")]


def test_offline_lengths_are_drawn_prompts_first() -> None:
    import random

    rng = random.Random(1)
    wanted = [rng.randint(100, 1024) for _ in range(512)]
    assert FULL.offline() == (wanted[:256], wanted[256:])
