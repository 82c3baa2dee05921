"""A proposer that somebody wrote may be broken: that costs its drafts, and no request."""

import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import oracle
import pytest
from engine_driver import VOCAB_SIZE, generate, greedy, pool_check, prompts_of

from graphrunner.core.errors import ConfigError
from graphrunner.speculative.proposer import DraftSequence

Propose = Callable[[Sequence[DraftSequence]], object]
FAULTS: dict[str, tuple[Propose, str]] = {
    "raises": (lambda sequences: sequences[9], "IndexError: "),
    "too few lists": (lambda sequences: [[5]], "ValueError: 1 lists of drafts for 2 requests"),
    "too many lists": (lambda sequences: [[5]] * 3, "ValueError: 3 lists of drafts for 2 requests"),
    "no lists": (lambda sequences: None, "TypeError: "),
    "too large": (
        lambda sequences: [[5, VOCAB_SIZE], []],
        f"[5, {VOCAB_SIZE}]: token ids go from 0 to {VOCAB_SIZE - 1}",
    ),
    "negative": (lambda sequences: [[], [5, -1]], f"[5, -1]: token ids go from 0 to {VOCAB_SIZE - 1}"),
}


@pytest.mark.parametrize(("propose", "told"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "told beside"])
def test_it_is_asked_no_more_and_every_request_goes_on(
    make_llm, solo, monkeypatch, caplog, propose: Propose, told: str, overlap: bool
) -> None:
    llm = make_llm(speculative_config={"method": "oracle", "adaptive": False}, overlap=overlap)
    calls: list[int] = []

    def counted(self: oracle.HostOracle, sequences: Sequence[DraftSequence]) -> object:
        calls.append(len(sequences))
        return propose(sequences)

    monkeypatch.setattr(oracle.HostOracle, "propose", counted)
    prompts = prompts_of([9, 20, 5])
    with caplog.at_level(logging.WARNING, logger="graphrunner"):
        answers = generate(llm, prompts, [greedy(12), greedy(12), greedy(12, speculative=False)])
        assert answers == [solo(prompt, 12) for prompt in prompts]
        assert generate(llm, prompts, greedy(4)) == [solo(prompt, 4) for prompt in prompts]
    assert calls == [2]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.exc_info and told in record.getMessage()
    assert record.getMessage().startswith("speculation (oracle) is off from here on: ")
    pool_check(llm)


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("method", ["take_rows", "propose"])
@pytest.mark.parametrize("num_good_calls", [0, 1])
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "told beside"])
def test_wherever_it_raises_its_drafts_are_all_that_is_lost(
    make_llm, solo, monkeypatch, caplog, place: str, method: str, num_good_calls: int, overlap: bool
) -> None:
    config = {"method": "oracle", "model": f"{place}:right", "num_speculative_tokens": 3, "adaptive": False}
    llm = make_llm(speculative_config=config, overlap=overlap, max_num_seqs=2)
    kind = {"host": oracle.HostOracle, "device": oracle.DeviceOracle}[place]
    works, calls = getattr(kind, method), []

    def broken(self: object, argument: object) -> object:
        calls.append(argument)
        if len(calls) > num_good_calls:
            raise RuntimeError("no more")
        return works(self, argument)

    monkeypatch.setattr(kind, method, broken)
    prompts = prompts_of([9, 20, 5, 12])
    with caplog.at_level(logging.WARNING, logger="graphrunner"):
        assert generate(llm, prompts, greedy(12)) == [solo(prompt, 12) for prompt in prompts]
    assert len(calls) == num_good_calls + 1
    (record,) = caplog.records
    assert record.getMessage() == "speculation (oracle) is off from here on: RuntimeError: no more"
    pool_check(llm)


def test_drafts_past_those_asked_for_are_cut_off(make_llm, solo, monkeypatch) -> None:
    llm = make_llm(speculative_config={"method": "oracle", "num_speculative_tokens": 2, "adaptive": False})
    monkeypatch.setattr(oracle.HostOracle, "propose", lambda self, sequences: [[5] * 40 for _ in sequences])
    prompts = prompts_of([9, 20])
    assert generate(llm, prompts, greedy(12)) == [solo(prompt, 12) for prompt in prompts]
    assert {step.num_drafts for step in llm.steps if step.mode.value == "verify"} <= {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({}, "module broken has no create_proposer"),
        ({"create_proposer": lambda config, target: None}, "returned None, which is no HostProposer or DeviceProposer"),
    ],
)
def test_a_module_that_makes_none_is_refused(make_llm, monkeypatch, members: dict[str, object], told: str) -> None:
    module = ModuleType("broken")
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, "broken", module)
    with pytest.raises(ConfigError, match=told):
        make_llm(speculative_config={"method": "broken"})
