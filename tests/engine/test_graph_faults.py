"""Faults of padding, static buffers and replay, each with its right value, on recordings, tapes and CUDA graphs.

SOLO is a prompt alone, eager, without a prefix cache, on the same device. A first token that differs counts only where
SOLO's two best logits are further apart than rounding is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from engine_driver import generate, greedy, pool_check, prompts_of, tokens

from graphrunner import LLM, SamplingParams

Make = Callable[..., LLM]
CASES = [
    pytest.param(("cpu", "recording", "recording"), id="recording"),
    pytest.param(("cpu", "full", "full"), id="tape"),
    pytest.param(("cuda", "full", "full"), id="cuda", marks=pytest.mark.cuda),
]
GAP = 1e-4


@dataclass(frozen=True)
class Place:
    """Engines of one device and backend, and what a prompt alone gives there."""

    make_llm: Make
    device: str
    decode_graph: str
    prefill_graph: str

    def engine(self, **options: object) -> LLM:
        base = {
            "device": self.device,
            "dtype": "float32",
            "decode_graph": self.decode_graph,
            "prefill_graph": self.prefill_graph,
            "decode_sizes": [1, 2, 4, 8],
            "prefill_sizes": [16, 64, 100],
        }
        return self.make_llm(**(base | options))

    def check_solo(self, prompts: list[list[int]], found: list[list[int]], **options: object) -> None:
        alone = self.make_llm(
            device=self.device, dtype="float32", max_num_seqs=1, enforce_eager=True, enable_prefix_caching=False,
            **options,
        )  # fmt: skip
        for prompt, ids in zip(prompts, found, strict=True):
            params = greedy(len(ids), logprobs=2)
            (output,) = alone.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            for place, (token, position) in enumerate(zip(ids, output.outputs[0].logprobs, strict=True)):
                if token != tokens(output)[place]:
                    best = sorted((entry.logprob for entry in position.values()), reverse=True)
                    assert best[0] - best[1] <= GAP, f"token {place} of {prompt}"
                    break
        alone.close()


@pytest.fixture(params=CASES)
def place(request: pytest.FixtureRequest, make_llm: Make) -> Place:
    return Place(make_llm, *request.param)


def finite_logprobs(output: object) -> bool:
    values = [entry.logprob for position in output.outputs[0].logprobs for entry in position.values()]
    return bool(torch.tensor(values).isfinite().all())


def canary(llm: LLM) -> list[list[int]]:
    return generate(llm, prompts_of([5], seed=1), greedy(8))


def test_poison_in_the_reserved_page_and_in_free_pages(place: Place) -> None:
    """B04"""
    llm = place.engine(decode_sizes=[4], num_pages=24, enable_prefix_caching=False)
    for layer in llm.engine.core.model_runner.decode_cuda_graph_runner.context.kv_layers:
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))
    for seed in (1, 2):  # the second three run on the pages of the first
        prompts = prompts_of([5, 16, 17], seed=seed)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy(20, logprobs=2), use_tqdm=False)
        assert all(finite_logprobs(output) for output in outputs)
        place.check_solo(prompts, [tokens(output) for output in outputs])
        place.check_solo(prompts, generate(llm, prompts, greedy(20)))
    assert llm.steps[-1].is_graph and llm.steps[-1].key.num_reqs == 4


@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_poisoned_pad_rows_never_reach_a_real_one(place: Place, quantization: str | None) -> None:
    """B05: the check makes padding rows NaN; a scale that is taken over a batch would take that in."""
    llm = place.engine(decode_sizes=[4], quantization=quantization, check_graphs=True)
    prompts = prompts_of([9])
    outputs = llm.generate([{"prompt_token_ids": prompts[0]}], greedy(12, logprobs=2), use_tqdm=False)
    assert finite_logprobs(outputs[0])
    found = generate(llm, prompts, greedy(12))
    if quantization is None or place.device == "cpu":
        place.check_solo(prompts, found, quantization=quantization)
    assert llm.graph_report().num_checked_steps >= 22
    assert all(step.num_padding_tokens == 3 for step in llm.steps if step.mode.value == "decode")


def test_small_large_small(place: Place) -> None:
    """B09: nothing that grows for the large one moves what the small one's graph reads."""
    llm = place.engine(enable_prefix_caching=False)
    small, large = prompts_of([5, 100])
    first = generate(llm, [small], greedy(8))
    generate(llm, [large], greedy(8))
    generate(llm, prompts_of([100] * 3, seed=4), greedy(3))  # eager: past every bucket
    assert generate(llm, [small], greedy(8)) == first
    place.check_solo([small], first)


@pytest.mark.parametrize("count", [3, 5, 7])
def test_the_first_batch_is_a_padded_one(place: Place, count: int) -> None:
    """B11"""
    llm = place.engine()
    prompts = prompts_of([4 + 3 * index for index in range(count)])
    place.check_solo(prompts, generate(llm, prompts, greedy(9)))
    assert all(step.is_graph for step in llm.steps if step.mode.value == "decode")


def test_random_state_advances_in_the_graph(place: Place) -> None:
    """B15"""
    llm = place.engine()
    (prompt,) = prompts_of([7])
    free = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], free.clone(n=16), use_tqdm=False)
    assert len({tuple(one.token_ids) for one in output.outputs}) >= 2
    seeded = free.clone(seed=7)
    alone = generate(llm, [prompt], seeded)
    assert len(set(alone[0])) > 1, "the same noise at every position"
    assert generate(llm, [prompt], seeded) == alone
    others = [free.clone(seed=index, top_p=0.7, top_k=9) for index in range(7)]
    assert generate(llm, [*prompts_of([4] * 7), prompt], [*others, seeded])[-1:] == alone
    assert all(step.is_graph for step in llm.steps if step.mode.value == "decode" and step.num_reqs <= 8)


@pytest.mark.parametrize("change", ["sleep", "reload", "close and capture"])
def test_buffers_that_are_replaced_are_bound_again(place: Place, change: str) -> None:
    """B17: the same tokens after it, from graphs that were made again or whose addresses have stayed."""
    llm = place.engine()
    expected = canary(llm)
    runner = llm.engine.core.model_runner.decode_cuda_graph_runner
    if change == "sleep":
        llm.sleep()
        llm.wake()
    elif change == "reload":
        llm.reload_weights()
    else:
        runner.close()
        runner.capture()
    before = sum(key.num_replays for key in llm.graph_report().keys)
    assert canary(llm) == expected
    assert sum(key.num_replays for key in llm.graph_report().keys) > before
    assert llm.steps[-1].is_graph
    pool_check(llm)


def test_warm_up_and_capture_leave_nothing_behind(place: Place) -> None:
    """B18"""
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=16, ignore_eos=True, detokenize=False)
    (prompt,) = prompts_of([33])
    answers = []
    for options in ({}, {"capture": "lazy"}, {"enforce_eager": True}):
        llm = place.engine(**options)
        stats, report = llm.engine.stats(), llm.graph_report()
        assert not llm.steps and not report.misses and not report.num_eager_steps
        assert all(key.num_replays == 0 and key.num_real_tokens == 0 for key in report.keys)
        assert (stats.num_running, stats.num_waiting, stats.num_used_pages, stats.num_preemptions) == (0, 0, 0, 0)
        text = llm.engine.metrics.text().decode()
        for name in ("output_tokens_total", "prompt_tokens_total", "tokens_total", "padding_tokens_total"):
            assert f"graphrunner_{name} 0.0" in text, name
        pool_check(llm)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        assert output.num_cached_tokens == 0 and llm.steps[0].step_id == 0
        answers.append(tokens(output))
        pool_check(llm)
    assert answers[0] == answers[1] == answers[2]
