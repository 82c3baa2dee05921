"""deterministic=True on whole engines: tokens and logprobs, bit for bit, whatever runs beside a request and however."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import pytest
from engine_driver import prompts_of

from graphrunner import LLM, SamplingParams
from graphrunner.core.errors import ConfigError

Make = Callable[..., LLM]
LENGTHS = [3, 30, 17, 61, 9, 44, 5, 26, 12]
CASES = [
    pytest.param({"device": "cpu", "enforce_eager": True}, id="eager"),
    pytest.param({"device": "cpu", "decode_graph": "recording", "prefill_graph": "recording"}, id="recording"),
    pytest.param({"device": "cpu", "decode_graph": "full", "prefill_graph": "off"}, id="tape"),
    pytest.param({"device": "cuda", "enforce_eager": True}, id="cuda-eager", marks=pytest.mark.cuda),
    pytest.param({"device": "cuda"}, id="cuda", marks=pytest.mark.cuda),
]


def params_of(index: int) -> SamplingParams:
    """Greedy ones and seeded ones; logprobs show more bits than tokens do."""
    return SamplingParams(
        temperature=0.0 if index % 2 else 0.9, seed=index, max_tokens=7, ignore_eos=True, detokenize=False, logprobs=3
    )


def results(llm: LLM, order: list[int]) -> dict[int, list[object]]:
    prompts = prompts_of(LENGTHS)
    outputs = llm.generate(
        [{"prompt_token_ids": prompts[i]} for i in order], [params_of(i) for i in order], use_tqdm=False
    )
    return {
        i: [
            (token, sorted((key, entry.logprob) for key, entry in position.items()))
            for token, position in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ]
        for i, output in zip(order, outputs, strict=True)
    }


@pytest.fixture
def alone(make_llm: Make) -> Callable[[str], dict[int, list[object]]]:
    """Each request by itself: eager, one at a time, no prefix cache."""

    def run(device: str) -> dict[int, list[object]]:
        llm = make_llm(
            deterministic=True, device=device, enforce_eager=True, max_num_seqs=1, enable_prefix_caching=False
        )
        return {i: results(llm, [i])[i] for i in range(len(LENGTHS))}

    return run


@pytest.mark.parametrize("options", CASES)
def test_the_same_bits_alone_and_in_any_batch(make_llm: Make, alone, options: dict[str, object]) -> None:
    expected = alone(options["device"])
    for chunk, seed, prompts_first in ((16, 1, False), (40, 2, True)):
        options = options | {"max_num_batched_tokens": chunk, "prompts_first": prompts_first}
        llm = make_llm(deterministic=True, max_num_seqs=6, **options)
        order = list(range(len(LENGTHS)))
        random.Random(seed).shuffle(order)
        assert results(llm, order) == expected
        assert results(llm, order[:4]) == {i: expected[i] for i in order[:4]}  # from the prefix cache
        if "enforce_eager" not in options:
            assert any(step.is_graph for step in llm.steps)


def test_preempted_requests_end_with_the_same_bits(make_llm: Make, alone) -> None:
    """A preempted request computes its own tokens again as a prompt."""
    expected = alone("cpu")
    llm = make_llm(
        deterministic=True, device="cpu", num_pages=10, max_num_seqs=6, page_size=8, max_model_len=72,
        prompts_first=False,
    )  # fmt: skip
    assert results(llm, [2, 4, 8, 0]) == {i: expected[i] for i in (2, 4, 8, 0)}
    assert llm.engine.core.scheduler.stats().num_preemptions > 0


NUMBERS = [{"quantization": "int8"}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}, {"dtype": "bfloat16"}]


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_other_numbers_on_a_cpu(make_llm: Make, numbers: dict[str, object]) -> None:
    options = {"deterministic": True, "device": "cpu", **numbers}
    single = make_llm(**options, max_num_seqs=1, enable_prefix_caching=False, enforce_eager=True)
    expected = {i: results(single, [i])[i] for i in (0, 1, 2)}
    assert results(make_llm(**options, max_num_batched_tokens=24), [2, 0, 1]) == expected


def test_what_cannot_be_promised_is_refused(make_llm: Make) -> None:
    with pytest.raises(ConfigError, match="deterministic=True: needs a native model"):
        make_llm(deterministic=True, device="cpu", model_impl="transformers")
    with pytest.raises(ConfigError, match="decode_graph='inductor': compiled steps"):
        make_llm(deterministic=True, device="cpu", decode_graph="inductor")


def test_the_start_says_what_is_not_covered(make_llm: Make, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("graphrunner.engine.determinism")
    logger.addHandler(caplog.handler)
    try:
        make_llm(deterministic=True, device="cpu")
        assert "Not covered: another device" in caplog.text
        caplog.clear()
        make_llm(device="cpu")
        assert not caplog.text
    finally:
        logger.removeHandler(caplog.handler)


@pytest.mark.cuda
def test_packed_weights_on_a_gpu_are_refused(make_llm: Make) -> None:
    with pytest.raises(ConfigError, match="covers dense weights"):
        make_llm(deterministic=True, device="cuda", quantization="int8")
