"""Speculation in the engine: faults that users report, and what results, metrics and settings say."""

import logging
import time

import draft_making
import oracle
import pytest
from engine_driver import VOCAB_SIZE, generate, greedy, pool_check, prompts_of, tokens

from graphrunner import LLM, SamplingParams
from graphrunner.core.errors import ConfigError, InvalidRequestError

K = 4


@pytest.fixture
def spec_llm(make_llm, tiny_folder):
    def make(method: str = "oracle", model: str | None = "host:right", k: int = K, **options: object) -> LLM:
        config: dict[str, object] = {"method": method, "num_speculative_tokens": k, "adaptive": False}
        if method == "ngram":
            config["prompt_lookup_min"] = 1
        if model is not None:
            config["model"] = str(tiny_folder) if model == "self" else model
        return make_llm(speculative_config=config, **options)

    return make


@pytest.fixture
def known(solo):
    """Prompts whose answers the oracle knows."""

    def make(lengths: list[int], seed: int = 5, num_tokens: int = 40) -> list[list[int]]:
        prompts = prompts_of(lengths, seed)
        for prompt in prompts:
            oracle.ANSWERS[tuple(prompt)] = solo(prompt, num_tokens)
        return prompts

    return make


def run(llm: LLM, prompts: list[list[int]], params: object) -> list:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def test_more_requests_than_the_capture_list(spec_llm, known, solo) -> None:
    llm = spec_llm(decode_sizes=[1, 2, 4], max_model_len=64)
    prompts = known([5, 9, 17, 3, 11, 20])
    assert generate(llm, prompts, greedy(12)) == [solo(p, 12) for p in prompts]
    eager = [s for s in llm.steps if s.mode.value == "verify" and not s.is_graph]
    assert eager and all(s.miss_reason.reason.name == "NUM_REQS" and s.miss_reason.limit == 4 for s in eager)
    long = known([52, 52], seed=8, num_tokens=12)
    assert generate(llm, long, greedy(12)) == [solo(p, 12) for p in long]
    assert all(step.is_graph for step in llm.steps[-2:] if step.mode.value == "verify")


@pytest.mark.parametrize("model", ["host:mixed", "device:mixed", "self"])
def test_rows_leave_one_by_one_and_others_join(spec_llm, known, solo, model) -> None:
    llm = spec_llm("draft_model" if model == "self" else "oracle", model)
    prompts = known([4 + index for index in range(8)])
    outputs = run(llm, prompts, [greedy(1 + index) for index in range(8)])
    assert [len(tokens(output)) for output in outputs] == list(range(1, 9))
    assert [tokens(o) for o in outputs] == [solo(p, 1 + index) for index, p in enumerate(prompts)]
    more = known([6, 7, 21, 3], seed=9)
    assert generate(llm, more, greedy(20)) == [solo(p, 20) for p in more]
    pool_check(llm)


def test_requests_join_while_others_speculate(spec_llm, known, solo) -> None:
    llm = spec_llm(max_num_batched_tokens=8, prompts_first=False)
    prompts = known([5, 30, 12, 40])
    engine, found = llm.engine, {}
    for index, prompt in enumerate(prompts):
        engine.add_request(f"r{index}", {"prompt_token_ids": prompt}, greedy(24))
        for _ in range(3):
            found |= {output.request_id: tokens(output) for output in engine.step()}
    while engine.has_unfinished_requests():
        found |= {output.request_id: tokens(output) for output in engine.step()}
    assert [found[f"r{index}"] for index in range(4)] == [solo(p, 24) for p in prompts]
    assert {step.mode.value for step in llm.steps} >= {"verify", "mixed"}


@pytest.mark.parametrize(("stop_at", "max_tokens", "reason"), [(2, 4, "stop"), (5, 4, "length"), (4, 9, "stop")])
def test_end_inside_an_accepted_block(spec_llm, known, solo, stop_at, max_tokens, reason) -> None:
    llm = spec_llm()
    candidates = (known([9], seed=seed)[0] for seed in range(50))
    prompt, answer = next((p, a) for p in candidates if len(set((a := solo(p, 12))[:6])) == 6)
    (output,) = run(llm, [prompt], greedy(max_tokens, stop_token_ids=[answer[stop_at]]))
    assert tokens(output) == answer[: min(stop_at + 1, max_tokens)]
    assert output.outputs[0].finish_reason == reason
    pool_check(llm)


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_max_tokens_is_exact(spec_llm, known, solo, max_tokens) -> None:
    (prompt,) = known([7])
    (output,) = run(spec_llm(model="device:right"), [prompt], greedy(max_tokens))
    assert tokens(output) == solo(prompt, max_tokens) and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("method", ["ngram", "oracle", "draft_model"])
def test_context_limit(spec_llm, known, solo, method) -> None:
    model = {"ngram": None, "oracle": "device:right", "draft_model": "self"}[method]
    llm = spec_llm(method, model, max_model_len=64, page_size=16)
    for length in range(58, 64):
        (prompt,) = known([length], seed=length, num_tokens=64 - length)
        (output,) = run(llm, [prompt], greedy(50))
        assert tokens(output) == solo(prompt, 64 - length) and output.outputs[0].finish_reason == "length"
    pool_check(llm)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_repeats_are_accepted(spec_llm, solo, k) -> None:
    llm = spec_llm("ngram", None, k)
    (prompt,) = prompts_of([6])
    first = solo(prompt, 40)
    again = prompt + first + prompt  # what followed before follows again, as far as the model sees it so
    (output,) = run(llm, [again], greedy(60))
    assert tokens(output) == solo(again, 60)
    (random_one,) = run(llm, prompts_of([30], seed=77), greedy(60))
    assert tokens(random_one) == solo(prompts_of([30], seed=77)[0], 60)


def test_preemption_and_prefix_hits(spec_llm, known, solo) -> None:
    llm = spec_llm(model="device:mixed", num_pages=9, page_size=16)
    prompts = known([17] * 4 + [16] * 4, num_tokens=60)
    assert generate(llm, prompts, greedy(60)) == [solo(p, 60) for p in prompts]
    assert llm.engine.stats().num_preemptions > 0
    pool_check(llm)
    again = run(llm, prompts[:1], greedy(30))[0]
    assert tokens(again) == solo(prompts[0], 30)


def test_prefix_cache_holds_accepted_tokens_only(spec_llm, known, solo) -> None:
    llm = spec_llm(model="host:mixed", page_size=4)
    (prompt,) = known([9])
    answer = tokens(run(llm, [prompt], greedy(23))[0])
    assert answer == solo(prompt, 23)
    longer = prompt + answer[:19]
    (output,) = run(llm, [longer], greedy(12))
    assert output.num_cached_tokens >= 24 and tokens(output) == solo(longer, 12)


@pytest.mark.parametrize("model", ["host:mixed", "device:mixed", "self"])
def test_random_requests_get_the_tokens_of_their_seed(spec_llm, make_llm, known, model) -> None:
    """Drafts without probabilities stand when they are what the target's own noise picks."""
    llm, plain = spec_llm("draft_model" if model == "self" else "oracle", model), make_llm()
    prompts = known([5, 12, 23])
    shared = {"ignore_eos": True, "detokenize": False, "max_tokens": 24}
    mixed = [
        SamplingParams(temperature=0.9, seed=7, top_p=0.9, **shared),
        SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.6, logit_bias={5: 3.0}, **shared),
        SamplingParams(temperature=0.6, seed=9, top_k=7, min_p=0.02, presence_penalty=0.8, min_tokens=9, **shared),
    ]
    for params in (*([one] * 3 for one in mixed), mixed):
        assert generate(llm, prompts, params) == generate(plain, prompts, params)
    assert any(step.num_accepted for step in llm.steps)


def test_logprobs_and_views_agree(spec_llm, make_llm, known) -> None:
    llm, plain = spec_llm(), make_llm()
    prompts = known([5, 12])
    for params in (
        greedy(11, logprobs=2),
        greedy(11, logprobs=0, stop_token_ids=[oracle.ANSWERS[tuple(prompts[0])][6]]),
    ):
        for one, other in zip(run(llm, prompts, params), run(plain, prompts, params), strict=True):
            mine, its = one.outputs[0], other.outputs[0]
            assert mine.token_ids == its.token_ids and len(mine.logprobs) == len(mine.token_ids)
            for ours, theirs in zip(mine.logprobs, its.logprobs, strict=True):
                assert ours.keys() == theirs.keys()
                assert all(abs(ours[key].logprob - theirs[key].logprob) < 1e-3 for key in ours)
            assert mine.cumulative_logprob == pytest.approx(its.cumulative_logprob, abs=1e-2)


def test_results_tell_accepted_lengths(spec_llm, known) -> None:
    llm = spec_llm()
    (prompt,) = known([7])
    stats = run(llm, [prompt], greedy(1 + 3 * (K + 1)))[0].outputs[0].speculation
    # The first token comes from the prompt's step; then three full rounds of four drafts and one more token each.
    assert stats.accepted_lengths == [0, 0, 0, 0, 3] and stats.mean_accepted_length == 4.0
    assert (stats.num_rounds, stats.num_drafts, stats.num_accepted) == (3, 12, 12)
    wrong = spec_llm(model="host:wrong")
    stats = run(wrong, [prompt], greedy(6))[0].outputs[0].speculation
    assert stats.num_accepted == 0 and stats.accepted_lengths[0] == stats.num_rounds
    text = llm.engine.metrics.text(llm.engine.stats()).decode()
    assert "graphrunner_draft_tokens_accepted_total 12.0" in text and "graphrunner_draft_tokens_total 12.0" in text
    assert llm.engine.stats().draft_acceptance == 1.0 and llm.engine.stats().mean_accepted_length == 4.0


def test_steps_and_results_count_the_same_drafts(spec_llm, known, solo) -> None:
    """Also where a stop ends a request in the middle of what stands."""
    llm = spec_llm()
    prompts = known([5, 9])
    stop = solo(prompts[0], 3)[2]
    cut, whole = run(llm, prompts, [greedy(20, stop_token_ids=[stop]), greedy(20)])
    assert len(tokens(cut)) <= 3 and cut.outputs[0].speculation.num_accepted < K
    counted = sum(output.outputs[0].speculation.num_accepted for output in (cut, whole))
    assert sum(step.num_accepted for step in llm.steps) == counted


def test_each_request_has_its_own_switch(spec_llm, known, solo) -> None:
    llm = spec_llm()
    prompts = known([5, 6, 7])
    params = [greedy(20, speculative=False), greedy(20, num_speculative_tokens=2), greedy(20)]
    off, two, all_ = run(llm, prompts, params)
    assert [tokens(o) for o in (off, two, all_)] == [solo(p, 20) for p in prompts]
    assert off.outputs[0].speculation is None
    assert len(two.outputs[0].speculation.accepted_lengths) == 3
    assert len(all_.outputs[0].speculation.accepted_lengths) == K + 1
    with pytest.raises(InvalidRequestError, match="num_speculative_tokens=17"):
        greedy(4, num_speculative_tokens=17)
    with pytest.raises(InvalidRequestError, match="speculative='yes'"):
        greedy(4, speculative="yes")


@pytest.mark.parametrize("is_adaptive", [True, False])
def test_drafts_that_cost_are_dropped_or_told(make_llm, known, solo, caplog, monkeypatch, is_adaptive) -> None:
    config = {"method": "oracle", "model": "host:wrong", "num_speculative_tokens": 8, "adaptive": is_adaptive}
    llm = make_llm(speculative_config=config, max_model_len=256)
    prompts = known([5, 6, 7, 8], num_tokens=200)
    controller = llm.engine.core.model_runner._speculation.controller
    for width in (1, *controller.widths):  # measured beforehand, so that the test does not depend on the machine
        for _ in range(2):
            controller.add_step(4, width, 1.0 + width)
    monkeypatch.setattr(controller, "add_step", lambda num_reqs, width, duration_ms: None)
    with caplog.at_level(logging.WARNING, logger="graphrunner"):
        assert generate(llm, prompts, greedy(100)) == [solo(p, 100) for p in prompts]
    num_verify = sum(step.mode.value == "verify" for step in llm.steps)
    assert (num_verify < 20) == is_adaptive, "wrong drafts were verified all the way"
    if not is_adaptive:
        told = {record.getMessage() for record in caplog.records}
        assert len(told) == 1 and "speculation (oracle) costs more than it saves at 4 requests" in told.pop()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "telepathy"}, "speculative_config.method='telepathy'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0: must be an integer from 1 to 16"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens=True"),
        ({"method": "ngram", "speculative_tokens": 3}, "speculative_config.speculative_tokens=3: unknown"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "must not exceed prompt_lookup_max=2"),
        ({"method": "eagle", "prompt_lookup_max": 3}, "prompt_lookup_max=3: is for method ngram: method eagle looks"),
        ({"method": "draft_model"}, "speculative_config.model=None"),
        ({"method": "ngram", "model": "draft"}, "speculative_config.model='draft': method ngram has no draft"),
        ({"method": "ngram", "adaptive": 1}, "speculative_config.adaptive=1"),
        ("ngram", "speculative_config='ngram'"),
    ],
)
def test_settings_that_cannot_work(make_llm, config, message) -> None:
    with pytest.raises(ConfigError) as caught:
        make_llm(speculative_config=config)
    assert message in str(caught.value)


def test_short_settings(make_llm, solo) -> None:
    llm = make_llm(speculative="ngram", num_speculative_tokens=2)
    (prompt,) = prompts_of([9])
    assert generate(llm, [prompt], greedy(12)) == [solo(prompt, 12)]
    with pytest.raises(ConfigError, match="num_speculative_tokens=2: needs a method"):
        make_llm(num_speculative_tokens=2)


def test_a_draft_of_another_vocabulary_is_refused(make_llm, tmp_path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=VOCAB_SIZE + 1
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"has {VOCAB_SIZE + 1} tokens and the target {VOCAB_SIZE}"):
        make_llm(speculative_config={"method": "draft_model", "model": str(tmp_path)})


@pytest.mark.cuda
@pytest.mark.parametrize("k", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("model", ["ngram", "host:mixed", "device:right", "device:mixed", "self"])
def test_tokens_on_cuda(spec_llm, make_llm, known, solo, model, k) -> None:
    method = {"ngram": "ngram", "self": "draft_model"}.get(model, "oracle")
    llm = spec_llm(method, None if model == "ngram" else model, k, decode_sizes=[1, 2, 4, 8], dtype="float32")
    prompts = known([5, 17, 30, 9, 3], num_tokens=60)
    assert generate(llm, prompts, greedy(40)) == [solo(p, 40) for p in prompts]
    assert all(step.is_graph for step in llm.steps if step.mode.value == "verify")
    plain = make_llm(dtype="float32", decode_sizes=[1, 2, 4, 8])
    shared = {"ignore_eos": True, "detokenize": False, "max_tokens": 24, "seed": 11}
    for params in (
        SamplingParams(temperature=0.9, top_p=0.9, top_k=20, **shared),
        SamplingParams(temperature=0.7, repetition_penalty=1.3, logit_bias={7: 2.0}, logprobs=2, **shared),
    ):
        assert generate(llm, prompts, params) == generate(plain, prompts, params)
    pool_check(llm)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", ["[(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0)]", 2, 3])
def test_trees_on_cuda(make_llm, known, solo, shape, tmp_path) -> None:
    field = "speculative_token_tree" if isinstance(shape, str) else "speculative_eagle_topk"
    config = {"method": "eagle", "model": str(draft_making.eagle1(tmp_path / "draft")), field: shape}
    options = {"dtype": "float32", "decode_sizes": [1, 2, 4, 8]}
    llm, plain = make_llm(speculative_config=config | {"adaptive": False}, **options), make_llm(**options)
    prompts = known([5, 17, 30, 9, 3], num_tokens=60)
    assert generate(llm, prompts, greedy(40)) == [solo(p, 40) for p in prompts]
    assert any(step.mode.value == "verify" and step.is_graph for step in llm.steps)
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=20, ignore_eos=True, max_tokens=24, seed=11)
    assert generate(llm, prompts, params) == generate(plain, prompts, params)
    pool_check(llm)


@pytest.mark.parametrize("decode_graph", ["recording", "full"])
def test_tokens_told_beside_the_next_step_are_all_told(make_llm, solo, decode_graph: str) -> None:
    """With poisoned outputs: what is told late was read before the next replay."""
    graphs = {"decode_graph": decode_graph, "decode_sizes": [4], "poison_outputs": True}
    llm = make_llm(speculative="ngram", num_speculative_tokens=3, overlap=True, **graphs)
    prompts = [*prompts_of([9, 17, 3]), [5, 6, 7, 8] * 5]
    lengths = [1, 4, 19, 24]
    answers = generate(llm, prompts, [greedy(length) for length in lengths])
    assert answers == [solo(p, length) for p, length in zip(prompts, lengths, strict=True)]
    assert any(step.num_accepted for step in llm.steps)
    pool_check(llm)


def test_a_round_is_accounted_for_once_the_next_one_is_launched(make_llm, monkeypatch) -> None:
    llm = make_llm(speculative="ngram", num_speculative_tokens=3, overlap=True)
    core = llm.engine.core
    order: list[tuple[str, int]] = []
    forward, resolved = core.model_runner.forward, core._speculation.resolved

    def launched(batch):
        order.append(("launched", batch.step_id))
        return forward(batch)

    def accounted(batch, *args, **options) -> None:
        order.append(("accounted", batch.step_id))
        resolved(batch, *args, **options)

    monkeypatch.setattr(core.model_runner, "forward", launched)
    monkeypatch.setattr(core._speculation, "resolved", accounted)
    generate(llm, [[5, 6, 7, 8] * 5], greedy(20))
    last = order[-1][1]
    pairs = [(("launched", step), ("accounted", step - 1)) for step in range(1, last + 1)]
    assert order == [("launched", 0), *(each for pair in pairs for each in pair), ("accounted", last)]


def test_what_a_step_ended_is_told_though_the_next_one_breaks(make_llm, solo, monkeypatch) -> None:
    llm = make_llm(speculative="ngram", num_speculative_tokens=3, overlap=True)
    prompts = prompts_of([9, 17])
    core = llm.engine.core
    forward = core.model_runner.forward

    def broken(batch):
        if len(batch.request_ids) == 1 and batch.mode.value != "prefill":  # the short one has just ended
            raise RuntimeError("on purpose")
        return forward(batch)

    monkeypatch.setattr(core.model_runner, "forward", broken)
    short, long = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], [greedy(6), greedy(30)], use_tqdm=False
    )
    assert list(short.outputs[0].token_ids) == solo(prompts[0], 6) and short.outputs[0].finish_reason == "length"
    told = list(long.outputs[0].token_ids)
    assert long.outputs[0].finish_reason == "error" and told and told == solo(prompts[1], 30)[: len(told)]
    monkeypatch.undo()
    assert generate(llm, prompts, greedy(8)) == [solo(prompt, 8) for prompt in prompts]
    pool_check(llm)


def test_a_request_aborted_while_its_round_runs_gives_everything_back(make_llm, solo) -> None:
    llm = make_llm(speculative="ngram", num_speculative_tokens=3, overlap=True)
    engine = llm.engine
    prompts = [[5, 6, 7, 8] * 5, *prompts_of([9])]
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, greedy(30))
    for _ in range(4):
        engine.step()
    engine.abort_request("0")
    engine.add_request("2", {"prompt_token_ids": prompts[1]}, greedy(10))  # may take the row that has a round in flight
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            done[output.request_id] = output
    assert list(done["1"].outputs[0].token_ids) == solo(prompts[1], 30)
    assert list(done["2"].outputs[0].token_ids) == solo(prompts[1], 10)
    pool_check(llm)


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "told beside"])
def test_a_reader_who_takes_time_does_not_make_rounds_dear(make_llm, monkeypatch, overlap: bool) -> None:
    llm = make_llm(speculative="ngram", num_speculative_tokens=3, overlap=overlap)
    controller = llm.engine.core._speculation.controller
    durations: list[float] = []
    monkeypatch.setattr(controller, "add_step", lambda num_reqs, width, duration_ms: durations.append(duration_ms))
    for _ in llm.stream({"prompt_token_ids": [5, 6, 7, 8] * 5}, greedy(12)):
        time.sleep(0.2)
    assert all(duration_ms < 200 for duration_ms in durations)
    assert durations or overlap
