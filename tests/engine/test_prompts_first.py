"""Prompts before decode rows: the same tokens, in other steps. tests/properties/test_prompts_first.py has the rules."""

from collections.abc import Callable

import draft_making
import oracle
import pytest
from engine_driver import generate, greedy, pool_check, prompts_of, tokens

from graphrunner import LLM, SamplingParams
from graphrunner.config.options import engine_config_from_options
from graphrunner.core.pooling import Pooling
from graphrunner.core.sampling_params import StructuredOutput
from graphrunner.engine.output_processor import RequestOutputKind

LENGTHS = [30, 5, 41, 12, 3, 26, 9, 17]
WORK = {
    "chunks": {"max_num_batched_tokens": 12},
    "preemption": {"max_num_batched_tokens": 12, "num_pages": 20, "page_size": 4},
    "no-cache": {"max_num_batched_tokens": 16, "enable_prefix_caching": False, "max_num_seqs": 3},
}
HOW = {
    "eager": {"enforce_eager": True},
    "recording-overlap": {
        "decode_graph": "recording", "prefill_graph": "recording", "decode_sizes": [1, 2, 4, 8],
        "prefill_sizes": [4, 8, 16], "overlap": True, "poison_outputs": True,
    },
    "tape-overlap": {
        "decode_graph": "full", "prefill_graph": "full", "decode_sizes": [1, 2, 4, 8], "prefill_sizes": [4, 8, 16],
        "overlap": True,
    },
}  # fmt: skip


def modes(llm: LLM) -> list[str]:
    return [step.mode.value for step in llm.steps]


def has_waited(llm: LLM) -> bool:
    """Whether a request that had computed something sat a step of prompts out, and went on after it."""
    steps, seen = llm.steps, set()
    for index, step in enumerate(steps):
        if step.mode.value == "prefill":
            later = {request_id for after in steps[index + 1 :] for request_id in after.request_ids}
            if (seen - set(step.request_ids)) & later:
                return True
        seen |= set(step.request_ids)
    return False


@pytest.mark.parametrize(
    ("work", "how"),
    [*((work, how) for work in WORK for how in ("eager", "recording-overlap")), ("preemption", "tape-overlap")],
)
def test_tokens_are_the_same(make_llm, solo, work: str, how: str) -> None:
    prompts = prompts_of(LENGTHS)
    params = [greedy(16 + index) for index in range(len(prompts))]
    expected = [solo(prompt, 16 + index) for index, prompt in enumerate(prompts)]
    for prompts_first in (False, True):
        llm = make_llm(**WORK[work], **HOW[how], prompts_first=prompts_first)
        assert generate(llm, prompts, params) == expected
        assert "mixed" in modes(llm) if not prompts_first else has_waited(llm)
        assert work != "preemption" or llm.engine.stats().num_preemptions
        pool_check(llm)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_drawn_and_penalized_tokens_are_the_same(make_llm, overlap: bool) -> None:
    """Noise goes by seed and position, counts of penalties by row: neither by step."""
    prompts = prompts_of(LENGTHS)
    drawn = {"temperature": 1.0, "max_tokens": 9, "ignore_eos": True, "detokenize": False}
    params = [
        SamplingParams(**drawn, seed=index, **({"presence_penalty": 0.7, "logprobs": 2} if index % 3 == 0 else {}))
        for index in range(len(prompts))
    ]
    made = []
    for prompts_first in (False, True):
        llm = make_llm(max_num_batched_tokens=12, overlap=overlap, prompts_first=prompts_first)
        made.append(generate(llm, prompts, params))
        pool_check(llm)
    assert made[0] == made[1]


def test_generate_decodes_with_the_whole_batch(make_llm) -> None:
    """Six equal prompts: not one mixed step, and each decode step has all six. By default."""
    llm = make_llm(max_num_batched_tokens=32)
    generate(llm, prompts_of([16] * 6), greedy(10))
    assert modes(llm) == ["prefill"] * 3 + ["decode"] * 9
    assert [step.num_reqs for step in llm.steps[3:]] == [6] * 9


def test_who_goes_first_unless_said(make_llm, tiny_folder) -> None:
    """A server's engine is built from the same options, but not by `LLM`."""
    assert engine_config_from_options({"model": str(tiny_folder)}).scheduler.prompts_first is None
    for said, mode in ((None, "prefill"), (True, "prefill"), (False, "mixed")):
        llm = make_llm(max_num_batched_tokens=16, prompts_first=said)
        generate(llm, prompts_of([16, 32]), greedy(4))
        assert modes(llm)[1] == mode


def test_a_stream_beside_prompts_ends_with_the_same_tokens(make_llm, solo) -> None:
    llm = make_llm(max_num_batched_tokens=12)
    short, *others = prompts_of([4, 40, 30])
    stream = llm.stream({"prompt_token_ids": short}, greedy(20))
    seen = tokens(next(stream))
    assert generate(llm, others, greedy(3)) == [solo(prompt, 3) for prompt in others]
    for output in stream:
        seen += tokens(output)
    assert seen == solo(short, 20) and has_waited(llm)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_embeddings_beside_rows_that_wait(make_llm, solo, overlap: bool) -> None:
    short, long = prompts_of([6, 60], seed=8)
    vectors = []
    for prompts_first in (False, True):
        llm = make_llm(max_num_batched_tokens=12, overlap=overlap, prompts_first=prompts_first)
        llm.engine.add_request("g", short, greedy(12), output_kind=RequestOutputKind.FINAL_ONLY)
        llm.engine.step()
        llm.engine.add_embedding_request("e", long, Pooling.MEAN)
        done = {}
        while llm.engine.has_unfinished_requests():
            done |= {output.request_id: output for output in llm.engine.step()}
        assert tokens(done["g"]) == solo(short, 12)
        vectors.append(done["e"].embedding)
        pool_check(llm)
    assert vectors[1] == pytest.approx(vectors[0], rel=1e-4, abs=1e-4)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory) -> Callable[[str], str]:
    makers = {"eagle": draft_making.eagle1, "mtp": draft_making.mtp, "frozen_kv_mtp": draft_making.frozen_kv}
    return lambda method: str(makers[method](tmp_path_factory.mktemp(method)))


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "tree", "mtp", "frozen_kv_mtp", "oracle"])
def test_drafts_outlast_the_wait(make_llm, solo, tiny_folder, draft_folder, method: str) -> None:
    """Rows verify in the first step after the prompts what was drafted before them."""
    config: dict[str, object] = {"method": method, "num_speculative_tokens": 2, "adaptive": False}
    if method == "ngram":
        config["prompt_lookup_min"] = 1
    elif method == "tree":
        config |= {"method": "eagle", "model": draft_folder("eagle"), "num_speculative_tokens": None}
        config["speculative_token_tree"] = "[(0,), (1,), (0, 0)]"
    else:
        known = {"draft_model": str(tiny_folder), "oracle": "device:mixed"}
        config["model"] = known.get(method) or draft_folder(method)
    llm = make_llm(speculative_config=config, max_num_batched_tokens=12, decode_sizes=[1, 2, 4, 8], prompts_first=True)
    first, second, third, long = prompts = [p * 2 for p in prompts_of([5, 4, 5, 30])]
    for prompt in prompts:
        oracle.ANSWERS[tuple(prompt)] = solo(prompt, 40)
    found = {}

    def step() -> object:
        found.update({output.request_id: tokens(output) for output in llm.engine.step()})
        return llm.steps[-1]

    for name, prompt in zip("abc", (first, second, third), strict=True):
        llm.engine.add_request(name, prompt, greedy(24), output_kind=RequestOutputKind.FINAL_ONLY)
    while step().mode.value != "verify":
        pass
    llm.engine.add_request("d", long, greedy(12), output_kind=RequestOutputKind.FINAL_ONLY)
    num_waited = 0
    while (record := step()).mode.value == "prefill":
        num_waited += 1
    assert num_waited == 5
    # On the host drafts are looked up when they are verified, and there may be none.
    assert record.num_reqs == 4 and (record.num_drafts >= 8 or method == "ngram"), "the drafts of a row were forgotten"
    if method == "draft_model":  # the target itself
        assert record.accepted_lengths == (2, 2, 2, 2), "the drafts of a row are not its own any more"
    while llm.engine.has_unfinished_requests():
        step()
    counts = {"a": 24, "b": 24, "c": 24, "d": 12}
    assert found == {name: solo(prompt, counts[name]) for name, prompt in zip("abcd", prompts, strict=True)}
    pool_check(llm)


@pytest.mark.embedded
@pytest.mark.xdist_group("embedded")
def test_a_grammar_goes_on_after_the_wait() -> None:
    """A row with a grammar reads its newest token from a step that is no longer the one before."""
    shape = StructuredOutput(regex="[0-9]{3}-[0-9]{3}")
    number = SamplingParams(temperature=0.0, max_tokens=12, structured_output=shape)
    options = {"max_num_seqs": 2, "max_model_len": 128, "max_num_batched_tokens": 32, "num_threads": 2}
    with LLM(**options, overlap=True, enforce_eager=True) as llm:
        (alone,) = llm.generate("My number is ", number, use_tqdm=False)
        stream = llm.stream("My number is ", number)
        text = next(stream).outputs[0].text
        llm.generate("word " * 70, SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
        text += "".join(output.outputs[0].text for output in stream)
        assert text == alone.outputs[0].text and len(text) == 7 and has_waited(llm)
