"""A speculative round beside its graphs: how often the host calls torch. On a card each call is 5 to 12 us."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import draft_making
import pytest
import torch
from engine_driver import greedy, prompts_of
from torch.utils._python_dispatch import TorchDispatchMode

from graphrunner import LLM
from graphrunner.core.shape_key import ForwardMode
from graphrunner.device.cpu import CpuDevice
from graphrunner.device.device import Fence
from graphrunner.execution.full_cuda_graph import FullCudaGraphBackend
from graphrunner.runner import request_table, staging
from graphrunner.runner.request_table import RequestTable
from graphrunner.sampling import readback

Make = Callable[..., LLM]
NUM_DRAFTS, PAGE_SIZE = 4, 16
MAKERS = ("tensor", "as_tensor", "from_numpy", "frombuffer")
STEADY = Counter(operators=1, records=1)
"""The copy of the round's tokens to the host, and the mark behind it."""
PAGES = Counter(operators=2, records=1, views=2)
"""When rows get pages: one packed copy, and the write of its values to their places; views of a new size are made."""
HOST_DRAFTS = Counter(operators=3, records=2, views=2)
"""Drafts that the host made: the same, and a load of how many each row has when that changed."""
METHODS = {
    "ngram": HOST_DRAFTS,
    "draft_model": Counter(),
    "eagle1": Counter(),
    "eagle3": Counter(),
    "grown": Counter(),
    "mtp": Counter(),
    "frozen_kv": Counter(),
}
"""What a round of each method does beyond `STEADY`."""
_ON_HOST = ("aten::resolve_conj", "aten::resolve_neg")  # what reads a host tensor's numbers


class Calls(TorchDispatchMode):
    """Counts operators while it is entered, but for those inside a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.is_in_graph = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() not in _ON_HOST:
            aliases = [one.alias_info for one in func._schema.arguments if one.alias_info is not None]
            self.add("views" if any(not alias.is_write for alias in aliases) else "operators")
        return func(*args, **(kwargs or {}))

    def add(self, kind: str) -> None:
        if not self.is_in_graph:
            self.counts[kind] += 1


class CountedCpu(CpuDevice):
    """A host that must copy to reach its own tensors, as if they were a card's, and counts what that takes."""

    has_own_memory = True

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def fence(self) -> Fence:
        calls = self._calls
        calls.add("fences")

        class CountedFence(Fence):
            def record(self) -> None:
                calls.add("records")

            def wait(self) -> None:
                pass

        return CountedFence()

    def host_block(self, num_bytes: int) -> torch.Tensor:
        self._calls.add("blocks")
        return super().host_block(num_bytes)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    device = CountedCpu(made)
    for module in (staging, request_table, readback):
        monkeypatch.setattr(module, "device_of", lambda _: device)

    replay = FullCudaGraphBackend.replay

    def replayed(self: FullCudaGraphBackend, key: object) -> object:
        made.is_in_graph = True
        try:
            return replay(self, key)
        finally:
            made.is_in_graph = False

    monkeypatch.setattr(FullCudaGraphBackend, "replay", replayed)

    def count(owner: object, name: str, kind: str) -> None:
        plain = getattr(owner, name)

        def counted(*args: object, **named: object) -> object:
            made.add(kind)
            return plain(*args, **named)

        monkeypatch.setattr(owner, name, counted)

    count(RequestTable, "_send", "page appends")
    for name in MAKERS:
        count(torch, name, "tensors from numbers")
    return made


@pytest.fixture(scope="module")
def drafts(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    heads = partial(draft_making.mtp, num_heads=NUM_DRAFTS)
    makers = {"eagle1": draft_making.eagle1, "eagle3": draft_making.eagle3, "mtp": heads}
    made = {name: make(root / name) for name, make in (makers | {"frozen_kv": draft_making.frozen_kv}).items()}
    return made | {"grown": made["eagle1"], "draft_model": tiny_folder}


def config_of(name: str, drafts: dict[str, Path]) -> dict[str, object]:
    method = {"eagle1": "eagle", "eagle3": "eagle", "grown": "eagle", "frozen_kv": "frozen_kv_mtp"}.get(name, name)
    config: dict[str, object] = {"method": method, "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    if name == "grown":
        config |= {"speculative_eagle_topk": 2, "speculative_num_steps": 3}
    return config | ({"prompt_lookup_min": 1} if name == "ngram" else {"model": str(drafts[name])})


@pytest.mark.parametrize("name", METHODS)
def test_a_round_is_two_calls_beside_its_graphs(
    make_llm: Make, calls: Calls, drafts: dict[str, Path], name: str
) -> None:
    llm = make_llm(
        device="cpu", decode_graph="full", decode_sizes=[4], page_size=PAGE_SIZE, max_model_len=256,
        speculative_config=config_of(name, drafts),
    )  # fmt: skip
    for index, prompt in enumerate(prompts_of([5, 5, 5])):  # of four: a padded step
        llm.engine.add_request(f"r{index}", {"prompt_token_ids": prompt * 3}, greedy(200))
    for _ in range(12):
        llm.engine.step()
    num_rounds = num_steady = 0
    for _ in range(24):
        calls.counts.clear()
        with calls:
            llm.engine.step()
        if llm.steps[-1].mode is not ForwardMode.VERIFY:
            continue  # n-grams found nothing that repeats
        assert llm.steps[-1].is_graph
        num_rounds += 1
        num_steady += not calls.counts["page appends"]
        pages = PAGES + Counter({"page appends": 1}) if calls.counts["page appends"] else Counter()
        assert calls.counts <= STEADY + METHODS[name] + pages, dict(calls.counts)
    assert num_rounds >= 10 and num_steady >= 4


def test_drafts_of_one_request_go_straight_to_its_row(make_llm: Make, calls: Calls, drafts: dict[str, Path]) -> None:
    config = config_of("ngram", drafts)
    options = {"device": "cpu", "page_size": PAGE_SIZE, "max_model_len": 256, "speculative_config": config}
    plain = make_llm(device="cpu", max_model_len=256)
    (prompt,) = prompts_of([5])
    expected = plain.generate([prompt * 3], greedy(100), use_tqdm=False)[0].outputs[0].token_ids
    llm = make_llm(decode_graph="full", decode_sizes=[1], **options)
    llm.engine.add_request("r", {"prompt_token_ids": prompt * 3}, greedy(100))
    met: list[Counter[str]] = []
    outputs = []
    while llm.engine.has_unfinished_requests():
        calls.counts.clear()
        with calls:
            outputs = llm.engine.step() or outputs
        if llm.steps[-1].mode is ForwardMode.VERIFY and not calls.counts["page appends"]:
            met.append(calls.counts.copy())
    assert list(outputs[0].outputs[0].token_ids) == list(expected)
    assert len(met) >= 4 and min(count["operators"] for count in met) == 2, "the drafts, and the round's tokens"
