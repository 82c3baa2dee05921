"""Speculation changes no token: every proposer, k, batch, chunk, cache, distance from the limit, stop."""

from collections.abc import Callable
from functools import partial

import draft_making
import oracle
import pytest
from engine_driver import generate, greedy, pool_check, prompts_of, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphrunner import LLM, SamplingParams

L = 64
SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
TREE = "[(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0)]"
METHODS = [
    ("ngram", None),
    ("draft_model", "self"),
    ("eagle", "drafts:eagle1"),
    ("eagle", "drafts:eagle3"),
    ("eagle", "tree:eagle1"),
    ("eagle", "grown:eagle1"),
    ("mtp", "drafts:mtp"),
    ("frozen_kv_mtp", "drafts:frozen_kv"),
    *(("oracle", f"{place}:{kind}") for place in ("host", "device") for kind in ("right", "wrong", "mixed")),
]


@pytest.fixture(scope="module")
def draft_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Drafts of random weights, by the name of what made them."""
    root = tmp_path_factory.mktemp("drafts")
    makers = (draft_making.eagle1, draft_making.eagle3, partial(draft_making.mtp, num_heads=8), draft_making.frozen_kv)
    names = ("eagle1", "eagle3", "mtp", "frozen_kv")
    return {f"drafts:{name}": str(make(root / name)) for name, make in zip(names, makers, strict=True)}


@pytest.fixture(scope="module")
def engine_of(tiny_folder, draft_folders) -> Callable[..., LLM]:
    made: dict[tuple, LLM] = {}

    def engine(method: str, model: str | None, k: int, **options: object) -> LLM:
        key = (method, model, k, *sorted(options.items()))
        if key not in made:
            config = config_of(method, model, k, str(tiny_folder), draft_folders) | {"adaptive": k == 4}
            made[key] = LLM(
                str(tiny_folder), max_model_len=L, max_num_seqs=9, num_pages=200, skip_tokenizer_init=True,
                num_threads=1, decode_sizes=(1, 2, 4, 8), speculative_config=config, **options,
            )  # fmt: skip
        return made[key]

    yield engine
    for llm in made.values():
        llm.close()


def config_of(method: str, model: str | None, k: int, target: str, folders: dict[str, str]) -> dict[str, object]:
    config: dict[str, object] = {"method": method, "num_speculative_tokens": k}
    if method == "ngram":
        config["prompt_lookup_min"] = 1
    if model is None:
        return config
    kind, _, name = model.partition(":")
    config["model"] = target if model == "self" else folders.get(f"drafts:{name}", model)
    if kind == "tree":
        config |= {"speculative_token_tree": TREE, "num_speculative_tokens": None}
    if kind == "grown":
        steps = 1 + k % 4
        num_drafts = 3 if steps == 1 else min(7, k + 3)
        config |= {"speculative_eagle_topk": 3, "speculative_num_steps": steps, "num_speculative_tokens": num_drafts}
    return config


@st.composite
def requests(draw) -> list[tuple[list[int], int, int]]:
    """(prompt, max_tokens, place of a stop in the answer or -1)."""
    shared = prompts_of([draw(st.integers(0, 20))], seed=draw(st.integers(0, 3)))[0]
    made = []
    for index in range(draw(st.integers(1, 9))):
        length = draw(st.one_of(st.integers(1, 30), st.integers(L - 8, L - 1)))
        own = prompts_of([length], seed=draw(st.integers(0, 50)) * 10 + index)[0]
        prompt = (shared + own)[:length] or own
        made.append((prompt, draw(st.integers(1, 40)), draw(st.integers(-6, 12))))
    return made


CASES = given(
    method=st.sampled_from(METHODS),
    k=st.integers(1, 8),
    options=st.fixed_dictionaries(
        {
            "max_num_batched_tokens": st.sampled_from([9, 64]),
            "enable_prefix_caching": st.booleans(),
            "prompts_first": st.booleans(),
            "overlap": st.booleans(),
        }
    ),
    asked=requests(),
)


@settings(SETTINGS, max_examples=14)
@CASES
def test_tokens_are_those_of_plain_decoding(engine_of, solo, *, method, k, options, asked) -> None:
    check_tokens(partial(engine_of, **options), solo, method, k, asked)


@pytest.mark.slow
@settings(SETTINGS, max_examples=250)
@CASES
def test_tokens_are_those_of_plain_decoding_at_length(engine_of, solo, *, method, k, options, asked) -> None:
    check_tokens(partial(engine_of, **options), solo, method, k, asked)


def check_tokens(engine_of, solo, method, k: int, asked) -> None:
    llm = engine_of(*method, k, page_size=4)
    prompts, params, expected, reasons = [], [], [], []
    for prompt, max_tokens, stop_at in asked:
        answer = solo(prompt, L - len(prompt))
        oracle.ANSWERS[tuple(prompt)] = answer
        kept, reason, stops = answer[:max_tokens], "length", None
        if 0 <= stop_at < len(kept):
            stops = [kept[stop_at]]
            kept, reason = kept[: kept.index(stops[0]) + 1], "stop"
        prompts.append({"prompt_token_ids": prompt})
        params.append(greedy(max_tokens, stop_token_ids=stops))
        expected.append(kept)
        reasons.append(reason)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [tokens(output) for output in outputs] == expected
    assert [output.outputs[0].finish_reason for output in outputs] == reasons
    pool_check(llm)
    if method == ("oracle", "host:wrong"):
        assert all(stats.num_accepted == 0 for o in outputs if (stats := o.outputs[0].speculation) is not None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "method"),
    [
        *((backend, method) for backend in ("full", "breakable") for method in METHODS[:7]),
        *((backend, method) for backend in ("inductor", "piecewise") for method in METHODS[:3]),
    ],
    ids=str,
)
@pytest.mark.timeout(1200)
def test_recorded_by_every_backend(make_llm, tiny_folder, draft_folders, solo, backend, method) -> None:
    config = config_of(*method, 2, str(tiny_folder), draft_folders) | {"adaptive": False}
    llm = make_llm(decode_graph=backend, decode_sizes=[4], speculative_config=config)
    prompts = [*prompts_of([9, 17, 30]), [5, 6, 7, 8] * 5]
    for prompt in prompts:
        oracle.ANSWERS[tuple(prompt)] = solo(prompt, 40)
    assert generate(llm, prompts, greedy(24)) == [solo(prompt, 24) for prompt in prompts]
    assert any(step.mode.value == "verify" for step in llm.steps)
    assert all(step.is_graph for step in llm.steps if step.mode.value == "verify")
    params = SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=12, ignore_eos=True, detokenize=False)
    plain = make_llm()
    assert generate(llm, prompts[:1], params) == generate(plain, prompts[:1], params)
