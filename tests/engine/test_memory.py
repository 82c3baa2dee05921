"""Memory and start-up: pages take what graphs leave, and every second and byte of a start belongs to a phase."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from engine_driver import generate, greedy, pool_check, prompts_of
from fakes.fake_accelerator import MIB, FakeAccelerator, install

from graphrunner import LLM
from graphrunner.core.errors import ConfigError
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.engine import build, residency
from graphrunner.engine.graph_forecast import GraphForecast
from graphrunner.engine.memory_plan import GRAPH_BYTES
from graphrunner.execution.recording import RecordingBackend
from graphrunner.kernels.triton.known_kernels import KnownKernels
from graphrunner.telemetry import startup

TOTAL, OTHERS, STEP, GRAPH = 2048 * MIB, 300 * MIB, 100 * MIB, 2 * MIB
LATE = 256 * MIB
GRAPHS = {"device": "cpu", "decode_graph": "recording", "prefill_graph": "recording"}
SIZES = {"decode_sizes": [1, 2, 4], "prefill_sizes": [16, 64]}
NUM_KEYS = 3 * 3 + 2
OPEN = {"num_pages": None, "max_num_seqs": 950, "gpu_memory_utilization": 0.5}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}

Make = Callable[..., LLM]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    """A card whose recordings take memory, and whose largest step does."""
    card = install(monkeypatch, FakeAccelerator(TOTAL, OTHERS))
    card.step_bytes = STEP
    real = RecordingBackend.capture_one

    def capture_one(self, key, forward, reset=None):
        stats = real(self, key, forward, reset)
        card.graph_bytes += GRAPH
        return stats

    def close(self) -> None:
        card.graph_bytes -= GRAPH * len(self._forwards)
        self._forwards.clear()

    monkeypatch.setattr(RecordingBackend, "capture_one", capture_one)
    monkeypatch.setattr(RecordingBackend, "close", close)
    return card


@pytest.mark.parametrize("share", [0.4, 0.5, 0.55])
def test_utilization_is_used_up_and_never_exceeded(make_llm: Make, solo, card: FakeAccelerator, share: float) -> None:
    llm = make_llm(**GRAPHS, **SIZES, **OPEN | {"gpu_memory_utilization": share})
    report = llm.startup_report()
    assert card.graph_bytes == GRAPH * NUM_KEYS
    limit = int(TOTAL * share)
    in_use = card.used_bytes() + STEP + LATE
    assert limit - 4 * MIB < in_use <= limit
    assert (report.limit_bytes, report.used_bytes) == (limit, card.used_bytes())
    assert llm.engine.stats().num_pages == report.num_pages - 1 > 5000
    prompts = prompts_of([5, 16, 40])
    assert generate(llm, prompts, greedy(9)) == [solo(prompt, 9) for prompt in prompts]
    pool_check(llm)
    llm.close()
    assert card.used_bytes() == OTHERS


def test_graphs_are_recorded_before_there_are_pages(make_llm: Make, card: FakeAccelerator, monkeypatch) -> None:
    seen: list[tuple[int, int]] = []
    real = RecordingBackend.capture_one

    def capture_one(self, key, forward, reset=None):
        seen.append((key.num_tokens, card.page_bytes()))
        return real(self, key, forward, reset)

    monkeypatch.setattr(RecordingBackend, "capture_one", capture_one)
    make_llm(**GRAPHS, **SIZES, **OPEN)
    sizes, pages = zip(*seen, strict=True)
    assert set(pages) == {4 * (1 << 16)}  # one granule a range: the dummy page
    assert list(sizes) == [64, 16, *[size for size in (4, 2, 1) for _ in range(3)]]  # largest first, over both phases


def test_lazy_graphs_are_paid_for_before_they_are_made(make_llm: Make, card: FakeAccelerator) -> None:
    llm = make_llm(**GRAPHS, **SIZES, **OPEN, capture="lazy")
    limit = TOTAL // 2
    assert card.graph_bytes == 0
    reserved = NUM_KEYS * GRAPH_BYTES + STEP
    assert limit - 4 * MIB < card.used_bytes() + reserved + STEP + LATE <= limit
    for _ in range(2):
        generate(llm, prompts_of([5, 16]), greedy(4))
    assert card.graph_bytes > 0 and card.used_bytes() + STEP + LATE <= limit


def test_what_does_not_fit_is_told_with_every_number(make_llm: Make, card: FakeAccelerator) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0.2: 409 of the device's 2048 MiB.* have 322, a st"):
        make_llm(**GRAPHS, **SIZES, **OPEN | {"gpu_memory_utilization": 0.2})
    with pytest.raises(ConfigError, match=r"num_pages=90000: 1024 of the device's 2048 MiB"):
        make_llm(**GRAPHS, **SIZES, **OPEN | {"num_pages": 90000})
    card.set_limit(10 * MIB)  # others were faster
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0.5: \d+ KV pages: .*out of memory"):
        make_llm(**GRAPHS, **SIZES, **OPEN)


def test_a_device_without_virtual_memory_is_sized_by_formula(make_llm: Make, solo, monkeypatch) -> None:
    card = install(monkeypatch, FakeAccelerator(4096 * MIB, OTHERS, has_virtual_memory=False))
    llm = make_llm(**GRAPHS, **SIZES, **OPEN | {"gpu_memory_utilization": 0.4})
    assert card.used_bytes() <= 0.4 * 4096 * MIB - (1 << 30)
    (prompt,) = prompts_of([20])
    expected = [solo(prompt, 6)]
    assert generate(llm, [prompt], greedy(6)) == expected
    llm.sleep()
    llm.wake()
    assert generate(llm, [prompt], greedy(6)) == expected


def test_phases_add_up_to_the_start(make_llm: Make, card: FakeAccelerator, monkeypatch) -> None:
    monkeypatch.setattr(startup, "_was_process_counted", False)
    before_s = startup.process_age_s()
    report = make_llm(**GRAPHS, **SIZES, **OPEN).startup_report()
    after_s = startup.process_age_s()
    assert [phase.name for phase in report.phases] == [
        "process start, imports", "configuration", "device", "weights", "tokenizer", "runners",
        "largest step", "capture, prefill_cuda_graph_runner", "capture, decode_cuda_graph_runner",
        "KV pages", "scheduler",
    ]  # fmt: skip
    assert before_s <= report.wall_s <= after_s + 0.05
    assert report.total_s == pytest.approx(report.wall_s, rel=0.05)
    bytes_of = {phase.name: phase.num_bytes for phase in report.phases}
    assert bytes_of["capture, decode_cuda_graph_runner"] == 9 * GRAPH
    assert sum(bytes_of.values()) == card.used_bytes() - OTHERS
    estimates = {phase.name: phase.estimated_bytes for phase in report.phases}
    assert estimates["capture, decode_cuda_graph_runner"] == 9 * GRAPH
    assert estimates["capture, prefill_cuda_graph_runner"] == 2 * GRAPH
    assert estimates["KV pages"] == pytest.approx(bytes_of["KV pages"], rel=0.1)
    assert estimates["weights"] == 4 * 96 * 48 * 2 + 4 * 2 * (48 * (64 + 2 * 32) + 64 * 48 + 3 * 48 * 96 + 2 * 48) + 192


@pytest.mark.parametrize("sizes", [[1, 2, 3, 4], [1, 4]])
def test_time_and_number_of_captures_follow_the_list(make_llm: Make, monkeypatch, sizes: list[int]) -> None:
    real = RecordingBackend.capture_one

    def capture_one(self, key, forward, reset=None):
        time.sleep(0.03)
        return real(self, key, forward, reset)

    monkeypatch.setattr(RecordingBackend, "capture_one", capture_one)
    llm = make_llm(device="cpu", decode_graph="recording", prefill_graph="off", decode_sizes=sizes)
    num_variants = len(ForwardVariant) - 1
    assert len(llm.graph_report().keys) == len(sizes) * num_variants
    (phase,) = [phase for phase in llm.startup_report().phases if phase.name.startswith("capture")]
    assert phase.seconds == pytest.approx(0.03 * len(sizes) * num_variants, rel=0.7)


def test_memory_of_a_list_is_told_by_its_first_recordings() -> None:
    used = [1000]
    for num_graphs, expected in ((20, 500 + 17 * 10), (6, 530), (3, 500), (1, 200)):
        forecast = GraphForecast(lambda: used[0], num_graphs)
        assert forecast.estimated_bytes is None
        for count, bytes_in_use in enumerate((0, 200, 400, 500, 510, 520, 530, 900)):
            used[0] = 1000 + bytes_in_use
            if count <= num_graphs:
                forecast.recorded(count)
        assert forecast.estimated_bytes == expected
        used[0] = 1000


@pytest.mark.parametrize("speculative", [None, NGRAM], ids=["plain", "ngram"])
def test_what_is_captured_is_used(make_llm: Make, solo, speculative) -> None:
    llm = make_llm(**GRAPHS, **SIZES, speculative_config=speculative)
    prompts = prompts_of([16, 64])
    for prompt in prompts:
        assert generate(llm, [prompt], greedy(8)) == [solo(prompt, 8)]
    replays = {(key.runner, key.key.num_tokens): key.num_replays for key in llm.graph_report().keys}
    assert replays["prefill_cuda_graph_runner", 16] >= 1 and replays["prefill_cuda_graph_runner", 64] >= 1
    eager = make_llm(device="cpu", enforce_eager=True)
    wanted = greedy(6, logprobs=3)
    both = [
        each.generate([{"prompt_token_ids": prompts[0]}], wanted, use_tqdm=False)[0].outputs[0] for each in (llm, eager)
    ]
    assert both[0].token_ids == both[1].token_ids
    for graph, plain in zip(both[0].logprobs, both[1].logprobs, strict=True):
        assert graph.keys() == plain.keys()
        assert all(graph[token].logprob == pytest.approx(plain[token].logprob, abs=1e-4) for token in graph)


def test_one_memory_pool_for_both_phases(make_llm: Make) -> None:
    llm = make_llm(device="cpu", decode_graph="full", prefill_graph="full", decode_sizes=[2], prefill_sizes=[16])
    pools = {id(runner.backend._pool) for runner in llm.engine.core.model_runner.graph_runners}
    assert len(llm.engine.core.model_runner.graph_runners) == 2 and len(pools) == 1


@pytest.mark.parametrize(("sizes", "num_seqs", "warns"), [(None, 600, True), ([4], 600, False), (None, 512, False)])
def test_a_list_that_ends_below_the_limit_is_told_at_the_start(
    make_llm: Make, caplog: pytest.LogCaptureFixture, sizes: list[int] | None, num_seqs: int, warns: bool
) -> None:
    options = {"decode_graph": "recording", "prefill_graph": "off", "capture": "lazy", "max_num_seqs": num_seqs}
    with caplog.at_level(logging.WARNING, logger="graphrunner"):
        make_llm(device="cpu", decode_sizes=sizes, **options)
    text = "decode graphs end at 512 requests, max_num_seqs is 600: larger steps run eagerly (set decode_sizes)"
    assert [record.getMessage() for record in caplog.records] == ([text] if warns else [])


def test_the_largest_step_leaves_no_trace(make_llm: Make, card: FakeAccelerator, solo) -> None:
    llm = make_llm(**GRAPHS, **SIZES, **OPEN | {"max_num_batched_tokens": 300})
    runner = llm.engine.core.model_runner
    assert not runner.request_table.num_computed.any() and not runner.request_table.last_token.any()
    assert llm.steps == [] and llm.graph_report().num_eager_steps == 0
    small = {"num_pages": 50, "gpu_memory_utilization": 0.9}
    drafting = make_llm(**GRAPHS, **SIZES, **small, speculative_config=NGRAM).engine.core.model_runner
    assert not drafting.request_table.num_computed.any()
    residency.run_largest_steps(runner, llm.engine.token_engine._residency._limits)
    assert not runner.request_table.num_computed.any() and not torch.is_inference_mode_enabled()


class Compiler:
    """Stands for a kernel compiler; `problem` is raised in its rehearsal."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem
        self.calls: list[str] = []
        self.known: list[KnownKernels] = []

    @contextmanager
    def rehearsal(self, known: KnownKernels) -> Iterator[None]:
        self.calls.append("begin")
        self.known.append(known)
        if self.problem is not None:
            raise self.problem
        yield
        self.calls.append("end")

    def close(self) -> None:
        self.calls.append("close")


def test_kernels_are_a_phase_of_their_own_before_the_largest_step(make_llm: Make, solo, card, monkeypatch) -> None:
    compiler = Compiler()
    monkeypatch.setattr(build, "_kernel_compiler", lambda device: compiler)
    llm = make_llm(**GRAPHS, **SIZES, **OPEN)
    names = [phase.name for phase in llm.startup_report().phases]
    assert names.index("kernels") + 1 == names.index("largest step")
    assert compiler.calls == ["begin", "end", "close"]
    (prompt,) = prompts_of([20])
    assert generate(llm, [prompt], greedy(6)) == [solo(prompt, 6)]


def test_known_kernels_take_the_place_of_a_rehearsal(make_llm: Make, solo, card, monkeypatch) -> None:
    compiler = Compiler()
    monkeypatch.setattr(build, "_kernel_compiler", lambda device: compiler)
    monkeypatch.setattr(KnownKernels, "load", lambda self: True)
    llm = make_llm(**GRAPHS, **SIZES, **OPEN)
    names = [phase.name for phase in llm.startup_report().phases]
    assert names.index("kernels") + 1 == names.index("largest step")
    assert compiler.calls == ["close", "close"]
    (prompt,) = prompts_of([20])
    assert generate(llm, [prompt], greedy(6)) == [solo(prompt, 6)]


def test_settings_that_launch_the_same_have_one_list_of_kernels(make_llm: Make, card, monkeypatch, tmp_path) -> None:
    compiler = Compiler()
    monkeypatch.setattr(build, "_kernel_compiler", lambda device: compiler)
    monkeypatch.setenv("GRAPHRUNNER_CACHE", str(tmp_path))
    for options in ({}, {"trace": str(tmp_path / "steps"), "seed": 1}, {"page_size": 8}, {"decode_sizes": [1, 2]}):
        make_llm(**GRAPHS | SIZES | OPEN | options).close()
        card.graph_bytes = 0
    plain, same, paged, smaller = (known._path() for known in compiler.known)
    assert plain == same and len({plain, paged, smaller}) == 3 and plain.parent.parent == tmp_path


def test_a_rehearsal_that_fails_costs_a_warning(make_llm: Make, card, monkeypatch, caplog) -> None:
    compiler = Compiler(RuntimeError("no such thing"))
    monkeypatch.setattr(build, "_kernel_compiler", lambda device: compiler)
    with caplog.at_level(logging.WARNING):
        make_llm(**GRAPHS, **SIZES, **OPEN)
    assert "as they are met: RuntimeError: no such thing" in caplog.text
    assert compiler.calls == ["begin", "close"]


def test_a_start_that_fails_ends_the_compiler(make_llm: Make, card, monkeypatch) -> None:
    compiler = Compiler()
    monkeypatch.setattr(build, "_kernel_compiler", lambda device: compiler)
    with pytest.raises(ConfigError):
        make_llm(**GRAPHS, **SIZES, **OPEN | {"gpu_memory_utilization": 0.16})
    assert compiler.calls[-1] == "close"


def test_what_a_runner_remembers_does_not_grow_with_the_sizes_of_steps(make_llm: Make, solo) -> None:
    llm = make_llm(**GRAPHS, **SIZES)
    for prompt in prompts_of([*range(3, 14)]):
        assert generate(llm, [prompt], greedy(2)) == [solo(prompt, 2)]
    runner = llm.engine.core.model_runner.prefill_cuda_graph_runner
    padded = {step.num_tokens for step in llm.steps if step.runner == runner.name and step.num_padding_tokens}
    assert len(padded) > len(list(runner.all_keys())) >= len(runner._cuts) > 0
