"""The page's tables are those of the saved run; the pictures draw from the saved run alone."""

import subprocess
import sys
from pathlib import Path

import pytest
from marks import MARKS
from performance_page import BEGIN, END, peer_of, tables, with_tables
from plot_h200 import FIGURES, draw_all
from result_rows import Row, save_json, save_rows

ROOT = Path(__file__).resolve().parents[2]
UNITS = {"offline": "tokens/s", "nano": "tokens/s", "small_prefill": "x", "start": "s", "capture": "s"}


def _invented_run(folder: Path) -> None:
    """A run whose figures are all at their marks."""
    rows = [
        Row(name, mark.must or 1.0, UNITS.get(name.split("/")[0], "ms"), 0.5, mark.must, mark.aim, "abc")
        for name, mark in MARKS.items()
    ]
    step = {
        "step_us": 900.0,
        "idle_us": 20.0,
        "kernels": {f"kernel_{n}": {"us": 100.0 - n, "count": 28} for n in range(10)},
    }
    graphs = [
        {"runner": runner, "num_tokens": size, "num_reqs": size, "variant": variant, "ms": size / 10}
        for runner, variant in (("decode_cuda_graph_runner", "greedy"), ("prefill_cuda_graph_runner", "hidden"))
        for size in (1, 8, 64)
    ]  # fmt: skip
    start = {"phases_s": {"imports": 4.0, "capture": 2.0, "first token": 0.1}, "graphs": graphs}
    parts = [
        {"part": "prompts", "num_steps": 18, "spent_s": 3.0, "floor_s": 2.7},
        {"part": "decode, 1 to 16 requests", "num_steps": 60, "spent_s": 0.25, "floor_s": 0.2},
    ]
    profiles = {
        "decode/8B/batch1": step, "decode/0.6B/batch256": step, "start/warm/8B": start, "start/cold/8B": start,
        "offline/8B": {"whole_s": 3.5, "parts": parts},
    }  # fmt: skip
    save_rows(folder / "h200.json", rows)
    save_json(folder / "h200_profile.json", profiles)


def test_the_page_says_what_the_saved_run_says() -> None:
    command = [sys.executable, "benchmarks/performance_page.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_changed_figure_is_noticed_and_written(tmp_path: Path) -> None:
    _invented_run(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nlast week\n{END}\nafter\n")
    readme = tmp_path / "readme.md"
    readme.write_text("A step takes <!-- h200: decode/8B/batch1 -->4.20 ms<!-- /h200 -->.\n")
    command = [sys.executable, "benchmarks/performance_page.py", "--from", str(tmp_path), "--page", str(page)]
    command += ["--readme", str(readme)]
    for arguments, code in ((["--check"], 1), ([], 0), (["--check"], 0)):
        done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
    assert readme.read_text() == "A step takes <!-- h200: decode/8B/batch1 -->3.95 ms<!-- /h200 -->.\n"
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "last week" not in text
    assert "| decode/8B/batch1 | 3.95 ms | 0.5 | 13% | 4.93 | 3.95 | 3.65 | pass |" in text
    assert f"{len(MARKS)} of {len(MARKS)} marks reached. Measured at commit abc." in text
    assert "### Where the time goes: decode/8B/batch1, 900 us" in text
    assert "| prompts | 18 | 3.00 | 2.70 | 90% |" in text and "| between steps | | 0.25 | | |" in text


def test_shortfalls_stand_out() -> None:
    text = tables([Row.of("offline/8B", 9000.0, "tokens/s", 20000.0)], {})
    assert "0 of 1 marks reached" in text and "**fall short**" in text


@pytest.mark.parametrize(
    ("name", "peer"),
    [("decode/8B/batch16", 5.44), ("offline/1B", 25_100), ("ttft/8B", 27.0), ("host_share/8B", None)],
)  # fmt: skip
def test_peers(name: str, peer: float | None) -> None:
    assert peer_of(name) == peer


def test_nothing_saved_is_said() -> None:
    assert "No run is saved." in with_tables(f"{BEGIN}{END}", tables([], {}))


def test_pictures_come_from_the_files_alone_and_are_the_same_each_time(tmp_path: Path) -> None:
    _invented_run(tmp_path)
    assert draw_all(tmp_path, tmp_path / "one") == list(FIGURES)
    draw_all(tmp_path, tmp_path / "two")
    for name in FIGURES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert draw_all(tmp_path / "empty", tmp_path / "none") == []
