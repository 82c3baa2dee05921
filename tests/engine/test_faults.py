"""Kinds of fault that users of such engines report, each with its right value."""

import math

import pytest
from engine_driver import VOCAB_SIZE, generate, greedy, pool_check, prompts_of, tokens

from graphrunner import SamplingParams
from graphrunner.core.errors import InvalidRequestError

GRAPHS = {"decode_graph": "recording", "prefill_graph": "recording"}


def test_context_limit_is_exact(make_llm, solo) -> None:
    llm = make_llm(max_model_len=64)
    for length, max_tokens, expected in ((63, 1, 1), (62, 2, 2), (62, 5, 2), (63, None, 1), (62, None, 2)):
        (prompt,) = prompts_of([length])
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
        assert tokens(output) == solo(prompt, expected)
        assert output.outputs[0].finish_reason == "length"
    for length in (64, 65, 1000):
        with pytest.raises(InvalidRequestError, match=rf"{length} tokens.*64"):
            llm.generate([{"prompt_token_ids": prompts_of([length])[0]}], greedy(1), use_tqdm=False)
    pool_check(llm)


def test_limits_of_the_capture_list(make_llm, solo) -> None:
    llm = make_llm(**GRAPHS, decode_sizes=[1, 2, 4], max_model_len=64)
    prompts = prompts_of([5, 9, 17, 3, 11, 20])
    assert generate(llm, prompts, greedy(12)) == [solo(p, 12) for p in prompts]
    eager = [s for s in llm.steps if s.mode.value == "decode" and not s.is_graph]
    assert eager and all(s.miss_reason.reason.name == "NUM_REQS" and s.miss_reason.limit == 4 for s in eager)
    long = prompts_of([56, 56], seed=8)
    assert generate(llm, long, greedy(8)) == [solo(p, 8) for p in long]
    assert llm.steps[-1].is_graph and llm.steps[-1].key.num_reqs == 2
    pool_check(llm)


def test_lazy_capture_records_between_steps(make_llm, solo) -> None:
    llm = make_llm(**GRAPHS, capture="lazy", decode_sizes=[1, 2])
    (prompt,) = prompts_of([6])
    assert generate(llm, [prompt], greedy(8)) == [solo(prompt, 8)]
    decode = [step for step in llm.steps if step.mode.value == "decode"]
    assert decode[0].miss_reason.reason.name == "NOT_CAPTURED" and all(step.is_graph for step in decode[1:])


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_size_that_fails_to_capture_is_served_eagerly(make_llm, solo, monkeypatch, failing: int) -> None:
    from graphrunner.core.errors import CaptureError
    from graphrunner.execution.recording import RecordingBackend

    real, calls = RecordingBackend.capture_one, []

    def capture_one(self, key, forward, reset=None):
        calls.append(key)
        if len(calls) == failing + 1:
            raise CaptureError(f"{key}: on purpose")
        return real(self, key, forward, reset)

    monkeypatch.setattr(RecordingBackend, "capture_one", capture_one)
    llm = make_llm(decode_graph="recording", prefill_graph="off", decode_sizes=[1, 2, 4])
    prompts = prompts_of([5, 7, 9, 4])
    for count in (1, 2, 4):
        assert generate(llm, prompts[:count], greedy(6)) == [solo(p, 6) for p in prompts[:count]]
    assert len(llm.graph_report().failed) == 1


def test_seeds_alone_and_in_company(make_llm) -> None:
    llm = make_llm(**GRAPHS)
    (prompt,) = prompts_of([7])
    random = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, detokenize=False, n=16)
    output = llm.generate([{"prompt_token_ids": prompt}], random, use_tqdm=False)[0]
    assert len({tuple(o.token_ids) for o in output.outputs}) >= 2
    seeded = random.clone(n=1, seed=7)
    alone = generate(llm, [prompt], seeded)
    assert generate(llm, [prompt], seeded) == alone
    others = [random.clone(n=1, seed=index, top_p=0.7, top_k=9) for index in range(7)]
    assert generate(llm, [*prompts_of([4] * 7), prompt], [*others, seeded])[-1:] == alone
    eager = make_llm(enforce_eager=True)
    assert generate(eager, [prompt], seeded) == alone
    with_logprobs = generate(eager, [prompt], seeded.clone(logprobs=1))
    assert with_logprobs == alone


def test_prefix_hits_never_cover_the_whole_prompt(make_llm, solo) -> None:
    llm = make_llm()
    for length in (31, 32, 33, 16, 15):
        (prompt,) = prompts_of([length], seed=length)
        first = llm.generate([{"prompt_token_ids": prompt}], greedy(5), use_tqdm=False)[0]
        second = llm.generate([{"prompt_token_ids": prompt}], greedy(5), use_tqdm=False)[0]
        assert tokens(first) == tokens(second) == solo(prompt, 5)
        assert first.num_cached_tokens == 0 and second.num_cached_tokens == (length - 1) // 16 * 16
    pool_check(llm)


def test_shared_prefixes_at_page_borders(make_llm, solo) -> None:
    llm = make_llm()
    for shared_len in (15, 16, 17, 32):
        (shared,) = prompts_of([shared_len], seed=shared_len)
        prompts = [shared + tail for tail in prompts_of([3, 5, 8], seed=2)] + prompts_of([12, 40], seed=9)
        assert generate(llm, prompts, greedy(6)) == [solo(p, 6) for p in prompts]
        assert generate(llm, prompts, greedy(6)) == [solo(p, 6) for p in prompts]
    pool_check(llm)


def test_preemption_at_page_borders(make_llm, solo) -> None:
    llm = make_llm(num_pages=9, max_num_seqs=8)
    prompts = prompts_of([17] * 4 + [16] * 4)
    assert generate(llm, prompts, greedy(60)) == [solo(p, 60) for p in prompts]
    assert llm.engine.core.scheduler.stats().num_preemptions >= 1
    pool_check(llm)


def test_a_pool_too_small(make_llm, solo) -> None:
    llm = make_llm(num_pages=5, max_model_len=128)
    (prompt,) = prompts_of([40])
    output = llm.generate([{"prompt_token_ids": prompt}], greedy(80), use_tqdm=False)[0]
    assert output.outputs[0].finish_reason == "length" and 20 <= len(tokens(output)) <= 25
    with pytest.raises(InvalidRequestError):
        generate(llm, prompts_of([80]), greedy(4))
    short = prompts_of([5, 6, 7])
    assert generate(llm, short, greedy(4)) == [solo(p, 4) for p in short]
    pool_check(llm)


def test_chunks_and_aborts(make_llm, solo) -> None:
    llm = make_llm(max_num_batched_tokens=8, num_pages=20, prompts_first=False)
    (prompt,) = prompts_of([40])
    engine = llm.engine
    for num_steps in range(0, 9):
        engine.add_request("a", {"prompt_token_ids": prompt}, greedy(4))
        for _ in range(num_steps):
            engine.step()
        was_live = engine.has_unfinished_requests()
        assert engine.abort_request("a") == was_live
        assert not engine.abort_request("a")
        pool_check(llm)
    generate(llm, prompts_of([30, 31, 32, 33], seed=4), greedy(8))
    assert generate(llm, [prompt], greedy(4)) == [solo(prompt, 4)]


@pytest.mark.parametrize("chunk", [8, 128])
def test_prompt_logprobs(make_llm, chunk: int) -> None:
    llm = make_llm(max_num_batched_tokens=chunk)
    (prompt,) = prompts_of([40])
    outputs = [
        llm.generate([{"prompt_token_ids": prompt}], greedy(2, prompt_logprobs=1, logprobs=2), use_tqdm=False)[0]
        for _ in range(2)
    ]
    for output in outputs:
        assert len(output.prompt_logprobs) == 40 and output.prompt_logprobs[0] is None
        assert len(output.outputs[0].logprobs) == 2
        for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert math.isfinite(entry[token].logprob)
    first, second = ([e[t].logprob for t, e in zip(prompt[1:], o.prompt_logprobs[1:], strict=True)] for o in outputs)
    assert first == pytest.approx(second, abs=1e-5)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([], "prompt"),
        ([-1], "prompt"),
        ([VOCAB_SIZE], "prompt"),
        ([1 << 40], "prompt"),
        (["a"], "prompt"),
        (3.5, "prompts"),
    ],
)
def test_bad_prompts_are_refused(make_llm, solo, prompt, field: str) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequestError) as refusal:
        llm.generate([prompt] if isinstance(prompt, list) else prompt, greedy(2), use_tqdm=False)
    assert refusal.value.field in (field, "prompt")
    (good,) = prompts_of([5])
    assert generate(llm, [good], greedy(8)) == [solo(good, 8)]
    assert llm.generate([], greedy(1), use_tqdm=False) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", {VOCAB_SIZE: 1.0}), ("stop_token_ids", [VOCAB_SIZE + 5]), ("stop", ["x"])],
)
def test_ids_are_checked_against_the_vocabulary(make_llm, field: str, value: object) -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=2, **{field: value})
    with pytest.raises(InvalidRequestError, match=field):
        llm.generate([{"prompt_token_ids": [5, 6]}], params, use_tqdm=False)
    pool_check(llm)


def test_every_field_has_its_effect(make_llm, solo) -> None:
    llm = make_llm(**GRAPHS)
    (prompt,) = prompts_of([9])
    plain = solo(prompt, 8)
    assert generate(llm, [prompt], greedy(8, stop_token_ids=[plain[1]]))[0] == plain[:2]
    held = generate(llm, [prompt], greedy(8, stop_token_ids=[plain[1]], min_tokens=4))[0]
    assert len(held) >= 4 and held[1] != plain[1]
    assert generate(llm, [prompt], greedy(3, logit_bias={7: 100.0}))[0] == [7, 7, 7]
    hot = SamplingParams(temperature=5.0, max_tokens=8, ignore_eos=True, detokenize=False)
    assert generate(llm, [prompt], hot.clone(top_k=1))[0] == plain
    assert generate(llm, [prompt], hot.clone(top_p=1e-6))[0] == plain
    assert generate(llm, [prompt], hot.clone(min_p=1.0))[0] == plain
    assert is_repetitive(prompt, solo(prompt, 24)), "the plain answer must repeat something for this to mean anything"
    for penalty in ({"repetition_penalty": 100.0}, {"repetition_penalty": 100.0, "frequency_penalty": 2.0}):
        assert not is_repetitive(prompt, generate(llm, [prompt], greedy(24, **penalty))[0])


def test_a_broken_step_ends_its_requests_only(make_llm, solo, monkeypatch) -> None:
    llm = make_llm()
    runner = llm.engine.core.model_runner
    real, calls = runner.sampler.sample, []

    def sample(output, batch):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("on purpose")
        return real(output, batch)

    monkeypatch.setattr(runner.sampler, "sample", sample)
    (prompt,) = prompts_of([6])
    output = llm.generate([{"prompt_token_ids": prompt}], greedy(8), use_tqdm=False)[0]
    assert output.outputs[0].finish_reason == "error" and "on purpose" in str(output.outputs[0].stop_reason)
    assert generate(llm, [prompt], greedy(8)) == [solo(prompt, 8)]
    pool_check(llm)


def test_overlap_delivers_the_same(make_llm, solo) -> None:
    llm = make_llm(overlap=True, **GRAPHS)
    prompts = prompts_of([5, 9, 17, 3])
    lengths = [1, 4, 9, 12]
    answers = generate(llm, prompts, [greedy(length) for length in lengths])
    assert answers == [solo(p, length) for p, length in zip(prompts, lengths, strict=True)]
    pool_check(llm)


def is_repetitive(prompt: list[int], answer: list[int]) -> bool:
    """Whether the answer repeats itself or its prompt."""
    return len(set(answer) | set(prompt)) < len(answer) + len(set(prompt))
