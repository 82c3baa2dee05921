"""Drafts on hidden states: whatever they propose, the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import draft_making
import pytest
import torch
from engine_driver import VOCAB_SIZE, generate, greedy, pool_check, prompts_of, tokens
from fakes.fake_accelerator import MIB, FakeAccelerator, install
from safetensors.torch import load_file

from graphrunner import LLM, SamplingParams
from graphrunner.core.errors import ConfigError
from graphrunner.core.outputs import RequestOutput

Make = Callable[[Path], Path]
DRAFTS: dict[str, tuple[str, int, Make]] = {
    "eagle3": ("eagle", 4, draft_making.eagle3),
    "eagle3-layers0": ("eagle", 3, lambda folder: draft_making.eagle3(folder, prefix="layers.0.")),
    "eagle1": ("eagle", 4, draft_making.eagle1),
    "mtp-deepseek": ("mtp", 2, draft_making.mtp),
    "mtp-mimo": ("mtp", 3, lambda folder: draft_making.mtp(folder, "MiMo", num_heads=3)),
    "mtp-qwen": ("mtp", 1, lambda folder: draft_making.mtp(folder, "Qwen", num_heads=1)),
    "frozen": ("frozen_kv_mtp", 3, draft_making.frozen_kv),
}
RIGHT = [name for name in DRAFTS if not name.startswith("eagle3")]


def _save_target(folder: Path, strength: float) -> Path:
    """A target whose blocks add `strength` times the usual; at nearly 0 the next token follows from the last alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB_SIZE, max_position_embeddings=256, tie_word_embeddings=False,
        initializer_range=0.5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(strength)
            layer.mlp.down_proj.weight.mul_(strength)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    strengths = {"simplest": 0.0, "simple": 0.001, "rich": 1.0}
    return {name: _save_target(root / name, strength) for name, strength in strengths.items()}


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    return {name: make(root / name) for name, (_, _, make) in DRAFTS.items()}


@pytest.fixture
def engines(targets: dict[str, Path], drafts: dict[str, Path]) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(target: str, draft: str | None = None, speculative: dict[str, object] | None = None, **options) -> LLM:
        base = {
            "max_model_len": 64, "max_num_seqs": 8, "num_pages": 200, "skip_tokenizer_init": True, "num_threads": 1,
            "prompts_first": False,  # mixed steps are harder for a draft; test_prompts_first.py has the others
        }  # fmt: skip
        if draft is not None:
            method, count, _ = DRAFTS[draft]
            has_tree = {"speculative_token_tree", "speculative_eagle_topk"} & set(speculative or {})
            count = None if has_tree else count
            config = {"method": method, "num_speculative_tokens": count, "model": str(drafts[draft])}
            base["speculative_config"] = config | {"adaptive": False} | (speculative or {})
        made.append(LLM(str(targets[target]), **(base | options)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="session")
def plain(targets: dict[str, Path]) -> Callable[[str, list[list[int]], int], list[list[int]]]:
    """Greedy tokens without speculation, graphs or a prefix cache, one prompt at a time."""
    known: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
    engines = {
        name: LLM(
            str(path), max_model_len=128, max_num_seqs=1, enforce_eager=True, enable_prefix_caching=False,
            skip_tokenizer_init=True, num_pages=64, num_threads=1,
        )
        for name, path in targets.items()
    }  # fmt: skip

    def run(target: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        for prompt in prompts:
            key = (target, tuple(prompt), num_tokens)
            if key not in known:
                known[key] = generate(engines[target], [prompt], greedy(num_tokens))[0]
        return [known[target, tuple(prompt), num_tokens] for prompt in prompts]

    return run


def rounds_of(llm: LLM) -> int:
    return sum(step.mode.value == "verify" for step in llm.steps)


@pytest.mark.parametrize("target", ["simple", "rich"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_same_tokens_as_plain(engines, plain, target: str, draft: str) -> None:
    llm = engines(target, draft, decode_sizes=[1, 2, 4])
    prompts = prompts_of([9, 17, 5, 33, 16])
    assert generate(llm, prompts, greedy(24)) == plain(target, prompts, 24)
    assert rounds_of(llm)
    pool_check(llm)


@pytest.mark.parametrize("draft", RIGHT)
def test_right_drafts_are_all_accepted(engines, plain, draft: str) -> None:
    """Every layout is read as its family means it: one tensor in the wrong place and nothing would be right."""
    llm = engines("simplest", draft)
    num_tokens = 1 + 4 * (DRAFTS[draft][1] + 1)
    prompt = prompts_of([9])
    assert generate(llm, prompt, greedy(num_tokens)) == plain("simplest", prompt, num_tokens)
    assert rounds_of(llm) == 4


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("eagle1", {"max_num_batched_tokens": 8}),
        ("mtp-deepseek", {"max_num_batched_tokens": 8}),
        ("frozen", {"max_num_batched_tokens": 8}),
        ("eagle1", {"enable_prefix_caching": False, "max_num_batched_tokens": 16, "max_num_seqs": 3}),
        ("mtp-deepseek", {"num_pages": 9}),
        ("eagle1", {"num_pages": 9}),
        ("frozen", {"decode_graph": "off"}),
        ("mtp-deepseek", {"decode_graph": "full", "decode_sizes": [2, 4]}),
        ("eagle1", {"decode_graph": "breakable", "decode_sizes": [2, 4]}),
        ("mtp-deepseek", {"capture": "lazy"}),
    ],
    ids=lambda one: one if isinstance(one, str) else "-".join(f"{key}={value}" for key, value in one.items()),
)
def test_same_tokens_whatever_runs_them(engines, plain, draft: str, options: dict[str, object]) -> None:
    """Chunks, few pages, few rows, every kind of recording."""
    llm = engines("simple", draft, **options)
    prompts = prompts_of([9, 33, 17, 20])
    for _ in range(2):  # the second time prefixes are there
        assert generate(llm, prompts, greedy(20)) == plain("simple", prompts, 20)
    pool_check(llm)


@pytest.mark.parametrize("draft", ["eagle1", "mtp-mimo", "frozen"])
def test_context_limit_and_short_outputs(engines, plain, draft: str) -> None:
    llm = engines("simple", draft)
    for length in (57, 58, 59, 60, 61, 62, 63):
        prompt = prompts_of([length], seed=length)
        got = generate(llm, prompt, greedy(50))[0]
        assert got == plain("simple", prompt, 64 - length)[0]
    prompts = prompts_of([7] * 8, seed=2)
    params = [greedy(count) for count in range(1, 9)]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    whole = plain("simple", prompts, 8)
    assert [tokens(one) for one in outputs] == [whole[index][: index + 1] for index in range(8)]


@pytest.mark.parametrize("draft", ["eagle1", "eagle3", "mtp-deepseek", "frozen"])
def test_random_requests_get_the_tokens_of_their_seed(engines, draft: str) -> None:
    """A draft is kept when the target's own noise picks it, so speculation changes nothing for a seed either."""
    params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=16, seed=5, ignore_eos=True, detokenize=False)
    prompts = prompts_of([9, 17, 12])
    expected = generate(engines("simplest"), prompts, params)
    llm = engines("simplest", draft)
    assert generate(llm, prompts, params) == expected
    if draft == "mtp-deepseek":
        assert rounds_of(llm) == 5, "the same distribution and the same noise: all stand"


TREE = "[(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0)]"


FIXED, GROWN = {"speculative_token_tree": TREE}, {"speculative_eagle_topk": 3}


@pytest.mark.parametrize("tree", [FIXED, GROWN], ids=["fixed", "grown"])
@pytest.mark.parametrize(
    ("target", "draft", "graph"),
    [
        ("simple", "eagle1", "recording"),
        ("simple", "eagle1", "full"),
        ("simple", "eagle1", "off"),
        ("rich", "eagle3", "recording"),
        ("simple", "eagle1", "breakable"),
    ],
)
def test_trees_give_the_same_tokens(
    engines, plain, target: str, draft: str, graph: str, tree: dict[str, object]
) -> None:
    llm = engines(target, draft, tree, decode_graph=graph, decode_sizes=[1, 2, 4], max_num_batched_tokens=16)
    prompts = prompts_of([9, 17, 5, 33, 16])
    assert generate(llm, prompts, greedy(24)) == plain(target, prompts, 24)
    params = SamplingParams(temperature=0.8, max_tokens=12, seed=5, ignore_eos=True, detokenize=False)
    assert generate(llm, prompts, params) == generate(engines(target), prompts, params)
    scored = generate(llm, prompts, greedy(8, logprobs=1))
    assert scored == plain(target, prompts, 8), "logprobs are of plain steps"
    pool_check(llm)


@pytest.mark.parametrize(("topk", "num_steps", "num_drafts"), [(2, None, 4), (7, 1, None), (4, 7, None), (3, 2, 5)])
def test_trees_of_every_size_grow(engines, plain, topk: int, num_steps: int | None, num_drafts: int | None) -> None:
    growth = {"speculative_eagle_topk": topk, "speculative_num_steps": num_steps, "num_speculative_tokens": num_drafts}
    llm = engines("simplest", "eagle1", growth)
    prompt = prompts_of([9])
    assert generate(llm, prompt, greedy(17)) == plain("simplest", prompt, 17)
    assert rounds_of(llm) <= 8, "the likeliest guess of the first level is always right"
    prompts = prompts_of([60, 5, 33, 16])
    assert generate(llm, prompts, greedy(4)) == plain("simplest", prompts, 4)


def test_the_path_may_lead_through_a_second_guess(engines, plain, targets, tmp_path: Path) -> None:
    head = load_file(targets["simplest"] / "model.safetensors")["lm_head.weight"]
    folder = draft_making.eagle1_second_best(tmp_path / "second", head)
    prompt = prompts_of([9])
    rounds = []
    for tree in (FIXED, GROWN, {"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0)]"}):
        llm = engines("simplest", "eagle1", {"model": str(folder), **tree})
        assert generate(llm, prompt, greedy(13)) == plain("simplest", prompt, 13)
        rounds.append(rounds_of(llm))
    assert rounds[0] <= 8 and rounds[1] <= 8, "the trees hold the right guesses of two places"
    assert rounds[2] >= 11, "the chain holds none"


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ("[(0,), (0, 1)]", r"leaves out rank 0"),
        ("[(0, 0)]", r"has no parent \(0,\)"),
        ("[(0,), (0,)]", "stands twice"),
        ("[]", "must be a list of paths"),
        ("[(0,), 'x']", "must hold ranks"),
        ("[(0,", "must be a list of paths"),
        (str([(rank,) for rank in range(8)]), "8 nodes, at most 7"),
    ],
)
def test_trees_that_cannot_be_are_refused(engines, tree: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        engines("simple", "eagle1", {"speculative_token_tree": tree})


def test_heads_say_how_many_drafts(engines) -> None:
    llm = engines("simple", "mtp-deepseek", {"num_speculative_tokens": None})
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert max(step.num_drafts for step in llm.steps) == 2


def test_what_cannot_work_is_refused(engines) -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=3.*at most 2"):
        engines("simple", "mtp-deepseek", {"num_speculative_tokens": 3})
    with pytest.raises(ConfigError, match=r"model=None.*none is shipped for method eagle"):
        engines("simple", "eagle1", {"model": None})
    with pytest.raises(ConfigError, match="method mtp makes no trees"):
        engines("simple", "mtp-deepseek", {"speculative_token_tree": TREE})
    for growth, problem in (
        ({"speculative_eagle_topk": 1}, "speculative_eagle_topk=1: must be an integer from 2 to 7"),
        ({"speculative_eagle_topk": 2, "num_speculative_tokens": 8}, "num_speculative_tokens=8: must be .* 1 to 7"),
        ({"speculative_eagle_topk": 2, "speculative_num_steps": 8}, "speculative_num_steps=8"),
        ({"speculative_num_steps": 3}, "speculative_num_steps=3: needs speculative_eagle_topk"),
        (
            {"speculative_eagle_topk": 2, "speculative_num_steps": 1, "num_speculative_tokens": 3},
            "num_speculative_tokens=3: must be at most 2",
        ),
        ({"speculative_eagle_topk": 2, "speculative_token_tree": TREE}, "stands instead of"),
    ):
        with pytest.raises(ConfigError, match=problem):
            engines("simple", "eagle1", growth)
    with pytest.raises(ConfigError, match="the tree has 7 drafts"):
        engines("simple", "eagle1", {"speculative_token_tree": TREE, "num_speculative_tokens": 5})
    with pytest.raises(ConfigError, match="check_graphs=True: must be off with a tree of drafts"):
        engines("simple", "eagle1", {"speculative_token_tree": TREE, "num_speculative_tokens": 7}, check_graphs=True)
    with pytest.raises(ConfigError, match="deterministic=True: must be off with a tree of drafts"):
        engines("simple", "eagle1", {"speculative_token_tree": TREE, "num_speculative_tokens": 7}, deterministic=True)
    with pytest.raises(ConfigError, match="only native models hand out"):
        engines("simple", "eagle1", model_impl="transformers")


@pytest.mark.parametrize("draft", ["eagle3", "eagle1", "mtp-mimo", "frozen"])
def test_drafts_are_as_good_after_sleep(
    engines: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    """On a device whose pages have no memory while graphs are recorded: a touch of one would end the process."""
    card = install(monkeypatch, FakeAccelerator(2048 * MIB))
    graphs = {"device": "cpu", "decode_graph": "recording", "prefill_graph": "recording", "decode_sizes": [1, 2, 4]}
    llm = engines("simple", draft, **graphs, prefill_sizes=[16, 64], enable_prefix_caching=False)
    prompts = prompts_of([5, 9, 20])

    def run() -> tuple[list[list[int]], int]:
        num_steps = len(llm.steps)
        return generate(llm, prompts, greedy(16)), len(llm.steps) - num_steps

    expected, held = run(), card.page_bytes()
    for level in (1, 2):
        llm.sleep(level)
        assert card.used_bytes() == 0
        llm.wake()
        assert run() == expected and card.page_bytes() == held


@pytest.mark.parametrize("draft", ["eagle1", "mtp-deepseek"])
def test_what_a_draft_missed_is_nothing_when_it_is_asked_again(engines, draft: str, monkeypatch) -> None:
    """Plain steps leave holes in its KV, where anything may stand."""
    llm = engines("rich", draft, {"adaptive": True})
    speculation = llm.engine.core.model_runner._speculation
    layers = speculation.proposer._context.runner_context.kv_layers
    for layer in layers:
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))
    widths = iter([3] * 3 + [1] * 9 + [3] * 99)
    if draft == "eagle1":
        widths = iter([5] * 3 + [1] * 9 + [5] * 99)
    monkeypatch.setattr(speculation.controller, "choose_width", lambda rows, num_drafts: next(widths))
    prompts = prompts_of([7, 5])
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(f"r{index}", {"prompt_token_ids": prompt}, greedy(40))
    for _ in range(16):
        llm.engine.step()
    assert [step.mode.value for step in llm.steps].count("decode") >= 8
    for row in (1, 2):
        assert is_filled(llm, row)


@pytest.mark.parametrize("draft", ["eagle1", "mtp-deepseek"])
def test_later_requests_do_not_find_what_a_draft_missed(engines, plain, draft: str, monkeypatch) -> None:
    """Of an answer that was given while the draft was off, only the prompt's pages are shared."""
    llm = engines("rich", draft, {"adaptive": True}, page_size=4)
    speculation = llm.engine.core.model_runner._speculation
    for layer in speculation.proposer._context.runner_context.kv_layers:
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))
    largest = speculation.controller.widths[-1]
    width = 1
    monkeypatch.setattr(speculation.controller, "choose_width", lambda rows, num_drafts: width)
    (prompt,) = prompts_of([9])
    (answer,) = generate(llm, [prompt], greedy(17))
    width = largest
    longer = prompt + answer
    llm.engine.add_request("later", {"prompt_token_ids": longer}, greedy(20))
    for _ in range(3):
        llm.engine.step()
    assert is_filled(llm, 1)
    (done,) = iter_done(llm)
    assert tokens(done) == plain("rich", [longer], 20)[0] and done.num_cached_tokens == 8
    (again,) = llm.generate([{"prompt_token_ids": longer + tokens(done)[:9]}], greedy(4), use_tqdm=False)
    assert again.num_cached_tokens >= 32, "what a draft took in is shared"
    pool_check(llm)


@pytest.mark.parametrize("draft", ["eagle1", "mtp-deepseek"])
@pytest.mark.parametrize("num_good_calls", [0, 2])
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "told beside"])
def test_what_a_broken_draft_misses_is_shared(
    engines, plain, draft: str, num_good_calls: int, overlap: bool, monkeypatch
) -> None:
    """Nobody reads its KV again, so answers go to the prefix cache as if there were none, before and after a sleep."""
    llm = engines("rich", draft, page_size=4, overlap=overlap)
    speculation = llm.engine.core.model_runner._speculation
    works, calls = speculation.proposer.propose, []

    def broken(round_: object) -> None:
        calls.append(round_)
        if len(calls) > num_good_calls:
            raise RuntimeError("no more")
        works(round_)

    monkeypatch.setattr(speculation.proposer, "propose", broken)
    (prompt,) = prompts_of([9])
    for num_cached in (0, 24, 40):
        (done,) = llm.generate([{"prompt_token_ids": prompt}], greedy(16), use_tqdm=False)
        assert tokens(done) == plain("rich", [prompt], 16)[0] and done.num_cached_tokens == num_cached
        assert len(calls) == num_good_calls + 1 and speculation.num_lookahead == 0
        prompt = prompt + tokens(done)
    llm.engine.sleep()
    llm.engine.wake()
    assert generate(llm, [prompt], greedy(4)) == plain("rich", [prompt], 4)
    assert len(calls) == num_good_calls + 1
    pool_check(llm)


def is_filled(llm: LLM, row: int) -> bool:
    """Whether the draft's own KV of a row holds numbers, up to the newest token but one."""
    table = llm.engine.core.model_runner.request_table
    layers = llm.engine.core.model_runner._speculation.proposer._context.runner_context.kv_layers
    page_size = layers[0].k.shape[1]
    places = torch.arange(int(table.num_computed[row]) - 1)
    pages = table.page_table[row, places // page_size].long()
    return all(bool(layer.k[pages, places % page_size].isfinite().all()) for layer in layers)


def iter_done(llm: LLM) -> Iterator[RequestOutput]:
    while llm.engine.has_unfinished_requests():
        yield from (output for output in llm.engine.step() if output.finished)
