"""Steady decode: the host waits for no kernel, and sends nothing to the device while the batch stays the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engine_driver import prompts_of, tokens

from graphrunner import LLM, SamplingParams
from graphrunner.device.cpu import CpuDevice
from graphrunner.runner import request_table, staging
from graphrunner.runner.request_table import RequestTable
from graphrunner.runner.staging import StagingBlock
from graphrunner.sampling import sampler
from graphrunner.sampling.pick import pick_random
from graphrunner.sampling.rows import SamplingRows

Make = Callable[..., LLM]
PAGE_SIZE = 16
MAKERS = ("tensor", "as_tensor", "from_numpy", "frombuffer")
"""Ways from Python numbers to a tensor."""


class RemoteCpu(CpuDevice):
    """A host that must copy to reach its own tensors, as if they were a card's."""

    has_own_memory = True


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what goes from the host to device rows, by the call that sends it."""
    counts: Counter[str] = Counter()
    device = RemoteCpu()
    for module in (staging, request_table):
        monkeypatch.setattr(module, "device_of", lambda _: device)

    # The host's own way to draw makes a tensor of what it drew; a card's way is that of the twin.
    monkeypatch.setattr(sampler, "pick_random_on_host", pick_random)

    def count(owner: object, name: str) -> None:
        plain = getattr(owner, name)

        def counted(*args: object, **named: object) -> object:
            counts[name] += 1
            return plain(*args, **named)

        monkeypatch.setattr(owner, name, counted)

    count(StagingBlock, "send")
    count(RequestTable, "_send")
    count(SamplingRows, "write")
    for name in MAKERS:
        count(torch, name)
    return counts


def start(llm: LLM, params: SamplingParams, lengths: tuple[int, ...]) -> list[str]:
    names = [f"r{index}" for index in range(len(lengths))]
    for name, prompt in zip(names, prompts_of(list(lengths)), strict=True):
        llm.engine.add_request(name, {"prompt_token_ids": prompt}, params)
    return names


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "random"])
def test_an_unchanged_step_sends_nothing(make_llm: Make, sent: Counter[str], temperature: float, overlap: bool) -> None:
    llm = make_llm(device="cpu", decode_graph="recording", decode_sizes=[4], overlap=overlap, page_size=PAGE_SIZE)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True, detokenize=False)
    start(llm, params, (5, 5, 5))
    for _ in range(3):
        llm.engine.step()
    num_steady = 0
    for length in range(9, 40):
        sent.clear()
        llm.engine.step()
        is_new_page = sent["_send"] > 0
        # One packed copy when rows get a page, none otherwise: every row's last token and length are there already.
        assert sent == ({"_send": 1, "send": 1} if is_new_page else {}), (length, dict(sent))
        num_steady += not is_new_page
    assert num_steady >= 28
    assert all(step.is_graph for step in llm.steps[1:])


def test_a_batch_that_changes_sends_rows_once(make_llm: Make, sent: Counter[str]) -> None:
    llm = make_llm(device="cpu", decode_graph="recording", decode_sizes=[1, 2, 4])
    start(llm, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False), (5,))
    extra = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, detokenize=False)
    llm.engine.add_request("long", {"prompt_token_ids": prompts_of([7])[0]}, extra)
    per_step = []
    while llm.engine.has_unfinished_requests():
        sent.clear()
        llm.engine.step()
        per_step.append(sent["send"])
    # Prompts and rows, the rows of two, two steady steps, the rows of one, and steady to the end.
    assert per_step[1:5] == [1, 0, 0, 1] and not any(per_step[5:])


@pytest.fixture
def errors_on_sync() -> Iterator[Callable[[str], None]]:
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "random"])
@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_steady_decode_never_synchronizes(
    make_llm: Make, errors_on_sync: Callable[[str], None], backend: str, temperature: float, overlap: bool
) -> None:
    """The one wait of a step, for its tokens, is on an event: it waits for that step and for no other work."""
    llm = make_llm(device="cuda", decode_graph=backend, decode_sizes=[4], overlap=overlap, page_size=PAGE_SIZE)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True, detokenize=False)
    start(llm, params, (5, 9, 7))
    for _ in range(4):
        llm.engine.step()
    finished = []
    errors_on_sync("error")
    for _ in range(40):  # pages are appended on the way
        finished += llm.engine.step()
    errors_on_sync("default")
    while llm.engine.has_unfinished_requests():
        finished += llm.engine.step()
    last = {output.request_id: tokens(output) for output in finished if output.finished}
    assert {len(ids) for ids in last.values()} == {60} and len(last) == 3
    assert all(step.is_graph for step in llm.steps if step.mode.value == "decode")


PROMPTS = (40, 9, 33, 25, 47, 12, 30, 21)


@pytest.mark.parametrize("prefill_graph", ["off", "recording"])
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "random"])
def test_no_step_makes_a_tensor_on_the_device_from_numbers(
    make_llm: Make, monkeypatch: pytest.MonkeyPatch, temperature: float, prefill_graph: str
) -> None:
    """On a card that copy waits for all work before it, so nothing of the next step would run beside this one."""
    options = {"prefill_graph": prefill_graph, "max_num_batched_tokens": 32, "overlap": True, "prompts_first": False}
    llm = make_llm(device="cpu", **options)
    monkeypatch.setattr(sampler, "pick_random_on_host", pick_random)
    placed = []
    plain = torch.tensor

    def tensor(data: object, **named: object) -> torch.Tensor:
        if named.get("device") is not None:
            placed.append(data)
        return plain(data, **named)

    monkeypatch.setattr(torch, "tensor", tensor)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=6, ignore_eos=True, detokenize=False)
    start(llm, params, PROMPTS)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert {"prefill", "mixed", "decode"} <= {step.mode.value for step in llm.steps}
    assert placed == []


@pytest.mark.cuda
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "random"])
@pytest.mark.parametrize("prefill_graph", ["off", "full"])
def test_prompts_never_synchronize(
    make_llm: Make, errors_on_sync: Callable[[str], None], prefill_graph: str, temperature: float
) -> None:
    options = {"prefill_graph": prefill_graph, "max_num_batched_tokens": 32, "overlap": True, "prompts_first": False}
    llm = make_llm(device="cuda", **options)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=6, ignore_eos=True, detokenize=False)
    for mode in ("default", "error"):  # the first time compiles and fills caches
        start(llm, params, PROMPTS)
        errors_on_sync(mode)
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        errors_on_sync("default")
    assert {"prefill", "mixed", "decode"} <= {step.mode.value for step in llm.steps}


SPECULATION = ["ngram", "draft_model"]


def speculating(make_llm: Make, folder: Path, method: str, **options: object) -> LLM:
    config: dict[str, object] = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    config |= {"model": str(folder)} if method == "draft_model" else {"prompt_lookup_min": 1}
    return make_llm(speculative_config=config, decode_sizes=[4], page_size=PAGE_SIZE, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "random"])
def test_a_round_of_an_unchanged_batch_sends_nothing(
    make_llm: Make, sent: Counter[str], tiny_folder: Path, temperature: float
) -> None:
    llm = speculating(make_llm, tiny_folder, "draft_model", device="cpu", decode_graph="recording")
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=90, ignore_eos=True, detokenize=False)
    start(llm, params, (5, 5, 5))
    for _ in range(3):
        llm.engine.step()
    num_steady = 0
    for _ in range(18):
        sent.clear()
        llm.engine.step()
        assert sent == ({"_send": 1, "send": 1} if sent["_send"] else {}), dict(sent)
        num_steady += not sent
    assert num_steady >= 8
    assert {step.mode.value for step in llm.steps[1:]} == {"verify"} and all(step.is_graph for step in llm.steps[1:])


@pytest.mark.cuda
@pytest.mark.parametrize("method", SPECULATION)
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "random"])
def test_a_speculative_round_never_synchronizes(
    make_llm: Make, tiny_folder: Path, errors_on_sync: Callable[[str], None], temperature: float, method: str
) -> None:
    llm = speculating(make_llm, tiny_folder, method, device="cuda")
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=100, ignore_eos=True, detokenize=False)
    start(llm, params, (5, 9, 7))
    for _ in range(4):
        llm.engine.step()
    errors_on_sync("error")
    for _ in range(16):
        llm.engine.step()
    errors_on_sync("default")
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert any(step.num_accepted for step in llm.steps)
