"""The command line, with an LLM that follows a script."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from loopback import start_server
from scripted_engine import FakeEngine
from typer.testing import CliRunner, Result

from graphrunner.config.options import SECTIONS
from graphrunner.core.errors import ModelLoadError
from graphrunner.core.outputs import CompletionOutput, RequestOutput, SpeculationStats, StepRecord
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.shape_key import ForwardMode, ForwardVariant, ShapeKey
from graphrunner.core.startup_report import StartupPhase, StartupReport
from graphrunner.entrypoints.cli.bench.measured import random_prompt
from graphrunner.entrypoints.cli.main import app
from graphrunner.execution.backend import CaptureStats
from graphrunner.runner.graph_account import GraphReport, KeyAccount
from graphrunner.telemetry.log import setup_logging

KEY = ShapeKey(4, 4, ForwardVariant.GREEDY)


class FakeLLM:
    """Says "one two three" to everything."""

    made: ClassVar[list[FakeLLM]] = []

    def __init__(self, model: str | None = None, **options: object) -> None:
        if model == "missing":
            raise ModelLoadError("model missing:\nno such folder")
        self.model, self.options = model, options
        self.prompts: list[object] = []
        self.params: list[SamplingParams] = []
        self.is_closed = False
        self.num_replays = 0
        self.engine = SimpleNamespace(vocab_size=97)
        FakeLLM.made.append(self)

    def stream(self, prompt: object, params: SamplingParams) -> Iterator[RequestOutput]:
        self.prompts.append(prompt)
        self.params.append(params)
        if prompt == "interrupt":
            raise KeyboardInterrupt
        for index, word in enumerate(("one", " two", " three")):
            output = CompletionOutput(0, word, [index], finish_reason="stop" if index == 2 else None)
            output.speculation = SpeculationStats(6, 3, [0, 1, 1]) if "speculative" in self.options else None
            yield RequestOutput("r", None, [1], [output], finished=index == 2)

    def generate(self, prompts: list[object], params: object, use_tqdm: bool = True) -> list[RequestOutput]:
        self.num_replays += 1
        time.sleep(0.001)
        return []

    def chat_prompt(self, messages: list[dict[str, str]]) -> dict[str, list[int]]:
        return {"prompt_token_ids": [len(messages)]}

    @property
    def steps(self) -> list[StepRecord]:
        return [StepRecord(0, ForwardMode.DECODE, "decode", KEY, 4, 4, True, None, 0.0, 1.0)]

    def startup_report(self) -> StartupReport:
        phases = (StartupPhase("weights", 1.5, 3 << 20, 4 << 20), StartupPhase("KV pages", 0.25, 5 << 20))
        return StartupReport(phases, 1.76, limit_bytes=20 << 20, used_bytes=9 << 20, num_pages=77)

    def graph_report(self) -> GraphReport:
        stats = CaptureStats(num_nodes=3, capture_ms=1.5, memory_bytes=1 << 20)
        keys = (KeyAccount("decode", KEY, stats, self.num_replays, 3 * self.num_replays),)
        return GraphReport(keys, (("prefill", KEY, "no memory"),), {("decode", "NUM_REQS"): 2}, 2)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.is_closed = True


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("graphrunner.entrypoints.llm.LLM", FakeLLM)
    # A handler on the runner's stderr would outlive it.
    monkeypatch.setattr("graphrunner.entrypoints.cli.main.setup_logging", lambda level: None)
    monkeypatch.setenv("COLUMNS", "200")
    FakeLLM.made = []

    def invoke(*args: str, text: str | None = None) -> Result:
        return CliRunner().invoke(app, list(args), input=text)

    return invoke


@pytest.mark.parametrize("command", [["generate", "--prompt", "Say"], ["chat"]])
def test_a_warning_follows_the_line_that_streams(run: Any, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    stream = FakeLLM.stream

    def warned(*args: Any) -> Any:
        for output in stream(*args):
            yield output
            logging.getLogger("graphrunner").warning("costs more")

    monkeypatch.setattr(FakeLLM, "stream", warned)
    monkeypatch.setattr(logging.getLogger("graphrunner"), "handlers", [])
    setup_logging()
    result = run(*command, text="hello\n")
    assert "one two three\nWARNING graphrunner: costs more\n" in result.output


def test_generate_says_what_became_of_drafts(run: Any) -> None:
    result = run("generate", "--prompt", "Say", "--speculative", "eagle")
    assert "[3 of 6 drafts stood, 1.50 a round in 2 rounds]" in result.stderr
    assert "drafts" not in run("generate", "--prompt", "Say", "--speculative", "eagle", "--no-stats").stderr


def test_generate(run: Any) -> None:
    result = run(
        "generate", "--prompt", "Say", "--max-tokens", "7", "--stop", "x", "--sampling-seed", "3", "--max-num-seqs", "2"
    )
    assert result.exit_code == 0, result.output
    assert (
        result.stdout == "Sayone two three\n"
        and "3 tokens, ended by stop" in result.stderr
        and "100% of 1 steps" in result.stderr
    )
    assert "drafts" not in result.stderr
    llm = FakeLLM.made[0]
    assert llm.options == {"max_num_seqs": 2} and llm.is_closed
    assert (llm.params[0].max_tokens, llm.params[0].stop_strings, llm.params[0].seed) == (7, ("x",), 3)


def test_generate_with_the_chat_template_and_from_stdin(run: Any) -> None:
    result = run("generate", "--prompt", "-", "--chat", "--no-stats", text="hello")
    assert result.stdout == "one two three\n" and result.stderr == ""
    assert FakeLLM.made[0].prompts == [{"prompt_token_ids": [1]}]


def test_engine_flags_become_options(run: Any) -> None:
    result = run(
        "generate", "--prompt", "a", "--decode-sizes", "1,2,4", "--no-enable-prefix-caching", "--enforce-eager",
        "--decode-graph", "recording", "--speculative-config", '{"method": "ngram"}', "--gpu-memory-utilization", "0.5",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert FakeLLM.made[0].options == {
        "decode_sizes": (1, 2, 4), "enable_prefix_caching": False, "enforce_eager": True, "decode_graph": "recording",
        "speculative_config": {"method": "ngram"}, "gpu_memory_utilization": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["serve"], ["graphs"], ["bench", "latency"]])
def test_every_setting_of_the_engine_is_a_flag_with_help(run: Any, command: list[str]) -> None:
    text = run(*command, "--help").output
    for section in SECTIONS.values():
        for field in fields(section):
            assert f"--{field.name.replace('_', '-')}" in text, field.name
    assert "Tokens a page. (default: 16)" in " ".join(text.split())


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["generate", "--prompt", "a", "--model", "missing"], "graphrunner: model missing: no such folder\n"),
        (["generate", "--prompt", "a", "--top-p", "3"], "graphrunner: top_p=3.0: must be above 0 up to 1\n"),
        (["generate", "--prompt", "a", "--decode-sizes", "x"], "graphrunner: decode_sizes='x': must be whole numbers"),
        (["serve", "--tool-call-format", "x"], "graphrunner: tool_call_format='x': must be one of auto, hermes"),
        (
            ["bench", "serve", "--json", "nowhere/x.json"],
            "graphrunner: json='nowhere/x.json': its folder does not exist",
        ),
        (["serve", "--host", ""], "graphrunner: host='': must not be empty"),
        (["serve", "--api-key-file", "nowhere"], "graphrunner: api_key_file='nowhere': cannot be read"),
        (["bench", "graphs", "--batches", "0"], "graphrunner: batches='0': must be positive"),
        (["bench", "serve", "--rate", "0"], "graphrunner: rate=0.0: must be above 0\n"),
        (["bench", "serve", "--trace", "nowhere"], "graphrunner: trace='nowhere': cannot be read as a trace"),
        (["bench", "serve", "--base-url", "http://127.0.0.1:9/v1"], "graphrunner: base_url='http://127.0.0.1:9/v1'"),
    ],
)
def test_an_error_of_ours_is_one_line_and_exit_code_2(run: Any, args: list[str], line: str) -> None:
    result = run(*args)
    assert result.exit_code == 2 and result.stderr.startswith(line), result.output
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.output


def test_ctrl_c_is_clean(run: Any) -> None:
    result = run("generate", "--prompt", "interrupt")
    assert result.exit_code == 130 and "Traceback" not in result.output and FakeLLM.made[0].is_closed


def test_chat_keeps_the_conversation(run: Any) -> None:
    result = run("chat", "--system", "be brief", text="hi\nand?\n/reset\nagain\n\n")
    assert result.exit_code == 0 and result.stdout.count("one two three") == 3
    assert "an empty line ends" in result.stderr
    assert FakeLLM.made[0].prompts == [{"prompt_token_ids": [count]} for count in (2, 4, 2)]


def test_graphs(run: Any) -> None:
    result = run("graphs", "--num-requests", "2")
    assert result.exit_code == 0, result.output
    for text in (
        "captured", "after 2 requests", "4t x 4r greedy", "NUM_REQS", "not captured: prefill", "25%", "1.75 of 1.76",
        "77 KV pages; 9 MiB of the card are in use, 20 may be",
    ):  # fmt: skip
        assert text in result.output
    report = json.loads(run("graphs", "--json").stdout)
    assert report["start"]["phases"][0]["estimated_bytes"] == 4 << 20 and report["start"]["total_s"] == 1.75
    assert report["captured"]["keys"][0]["num_replays"] == 0 and report["after"]["keys"][0]["num_replays"] == 1


@pytest.mark.parametrize("name", ["offline", "latency", "graphs"])
def test_bench(run: Any, name: str) -> None:
    assert run("bench", name).exit_code == 0
    json.loads(run("bench", name, "--json").stdout)
    assert all(llm.is_closed for llm in FakeLLM.made)


def test_env_and_version(run: Any) -> None:
    result = run("env")
    assert result.exit_code == 0 and "torch" in result.output and "cores" in result.output
    told = json.loads(run("env", "--json").stdout)
    assert told["python"] and told["processor"] and told["compiler"] and "/" not in told["memory"]
    assert run("--version").output.strip() == "0.1.0"


def test_bench_serve_measures_a_server(run: Any, tmp_path: Path) -> None:
    server = start_server(FakeEngine)
    try:
        report_file, trace = tmp_path / "report.json", tmp_path / "trace.csv"
        url = ["bench", "serve", "--base-url", f"{server.url}/v1"]
        args = [*url, "--prompt-len", "4", "--output-len", "5", "--spread", "0", "--text-prompts"]
        result = run(
            *args, "--num-requests", "20", "--rate", "1000", "--json", str(report_file), "--slo-ttft-ms", "10000"
        )
        assert result.exit_code == 0, result.output
        report = json.loads(report_file.read_text())
        assert report["num_failed"] == 0 and [each["num_tokens"] for each in report["requests"]] == [5] * 20
        assert report["goodput_requests_per_s"] == pytest.approx(report["requests_per_s"])
        assert set(report["ttft_ms"]) == {"p50", "p90", "p99"} and report["itl_ms"]["p50"] >= 0
        assert report["settings"]["rate"] == 1000 and report["objective"] == {"ttft_ms": 10000, "itl_ms": None}
        assert report["late_ms"]["p50"] >= 0
        rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,3,2"]
        trace.write_text("\n".join([*rows, "2023-11-16 18:17:04.0799600,99,3"]))
        replay = ["--trace", str(trace), "--max-len", "10", "--text-prompts", "--json", str(report_file)]
        result = run(*url, *replay, "--plot", str(tmp_path / "run.png"))
        assert result.exit_code == 0, result.output
        report = json.loads(report_file.read_text())
        assert [each["num_tokens"] for each in report["requests"]] == [2, 3]
        assert report["settings"]["trace"] == "trace.csv" and report["objective"] == {"ttft_ms": None, "itl_ms": None}
        assert report["requests"][1]["start_s"] == pytest.approx(0.1, abs=0.05)
        assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
        slow = [*replay, "--time-scale", "4"]
        assert run(*url, *slow).exit_code == 0
        assert json.loads(report_file.read_text())["requests"][1]["start_s"] == pytest.approx(0.4, abs=0.1)
        result = run(*url, "--num-requests", "1", "--prompt-len", "70")
        assert result.exit_code == 1 and "1 x HTTP 400" in result.stderr
    finally:
        server.stop()


def test_help_is_instant_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = ['graphrunner', '--help']\nfrom graphrunner.entrypoints.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = [name for name in ('torch', 'transformers', 'fastapi', 'uvicorn', 'httpx') if name in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)


def test_benchmark_prompts_fit_small_vocabularies() -> None:
    for vocab_size in (2, 97, 50_000):
        ids = random_prompt(random.Random(1), 200, vocab_size)["prompt_token_ids"]
        assert len(ids) == 200 and 0 < min(ids) <= max(ids) < vocab_size
