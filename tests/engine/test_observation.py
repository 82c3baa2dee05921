"""Trace files and profiler ranges of a whole engine."""

import json
from pathlib import Path

import pytest
import torch
from engine_driver import generate, greedy, pool_check, prompts_of

from graphrunner.core.errors import ConfigError
from graphrunner.telemetry import ranges


def test_a_trace_tells_of_every_step_and_request(make_llm, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    llm = make_llm(trace=path, decode_graph="recording", decode_sizes=[4])
    generate(llm, prompts_of([5, 9, 4]), [greedy(3), greedy(6), greedy(4)])
    steps = llm.steps
    llm.close()
    llm.close()
    events = json.loads(path.read_text())["traceEvents"]
    shown = [event for event in events if event["ph"] == "X"]
    assert [event["args"]["step"] for event in shown] == [step.step_id for step in steps]
    assert all(event["dur"] > 0 and isinstance(event["tid"], int) for event in shown)
    assert {event["args"]["runner"] for event in shown} == {"eager", "decode_cuda_graph_runner"}
    lives = [event for event in events if event["ph"] == "b" and event["name"] == event["id"]]
    assert [event["args"]["output_tokens"] for event in lives] == [3, 6, 4]
    assert {event["args"]["finish_reason"] for event in lives} == {"length"}
    for event in lives:
        first = min(step["ts"] for step in shown if event["id"] in step["args"]["request_ids"])
        assert event["ts"] <= first


def test_a_trace_that_cannot_be_written_stops_the_start(make_llm, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace="):
        make_llm(trace=str(tmp_path / "no" / "file"))


@pytest.mark.parametrize(
    "options", [{}, {"overlap": True}, {"speculative": "ngram"}, {"speculative": "ngram", "overlap": True}], ids=str
)
def test_whoever_ends_in_a_step_that_cannot_be_told_hears_of_it(make_llm, solo, monkeypatch, options) -> None:
    llm = make_llm(**options)
    prompts, lengths = prompts_of([5, 9]), [3, 12]
    for broken in range(5):  # the short answer ends in one of these steps
        countdown = iter(range(broken, -1, -1))

        def watch(record: object, countdown=countdown) -> None:
            if next(countdown, 1) == 0:
                raise RuntimeError("on purpose")

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.core, "_on_step", watch)
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], [greedy(n) for n in lengths], use_tqdm=False
            )
        for prompt, length, output in zip(prompts, lengths, outputs, strict=True):
            answer = output.outputs[0]
            assert answer.token_ids == solo(prompt, length)[: len(answer.token_ids)]
            is_whole = len(answer.token_ids) == length
            assert answer.finish_reason == ("length" if is_whole else "error")
            assert is_whole or "on purpose" in answer.stop_reason
        pool_check(llm)


def test_the_account_counts_operators_padding_and_misses(make_llm) -> None:
    llm = make_llm(decode_graph="recording", prefill_graph="off", decode_sizes=[2, 4], max_num_seqs=6)
    generate(llm, prompts_of([5, 6, 7]), greedy(4))
    report = llm.graph_report()
    (used,) = [key for key in report.keys if key.num_replays]
    assert (used.key.num_reqs, used.num_replays, used.padding_share) == (4, 3, 0.25)
    assert used.stats.num_nodes > 20 and used.stats.capture_ms > 0
    generate(llm, prompts_of([5] * 6), greedy(4))
    report = llm.graph_report()
    assert report.misses_by_runner["decode_cuda_graph_runner", "NUM_REQS"] == 3 == report.misses["NUM_REQS"]


def test_ranges_show_in_a_profile(make_llm) -> None:
    llm = make_llm(nvtx=True, decode_graph="recording", capture="lazy")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            generate(llm, prompts_of([5]), greedy(4))
    finally:
        ranges.turn_off()
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("graphrunner.")}
    expected = {"load_batch", "execute", "sample", "schedule", "capture"}
    assert {key.removeprefix("graphrunner.") for key in counts} == expected
    assert counts["graphrunner.execute"] == len(llm.steps) == counts["graphrunner.sample"]
