"""The same tokens whatever records the forwards, for a native model and for a foreign one."""

import pytest
from engine_driver import generate, greedy, prompts_of


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("backend", ["off", "recording", "full", "breakable"])
def test_same_tokens(make_llm, solo, backend: str, impl: str) -> None:
    llm = make_llm(
        decode_graph=backend, prefill_graph=backend, decode_sizes=[2, 4], prefill_sizes=[16, 32], model_impl=impl
    )
    prompts = prompts_of([9, 17, 5])
    assert generate(llm, prompts, greedy(6)) == [solo(prompt, 6) for prompt in prompts]
    decode = [step for step in llm.steps if step.mode.value == "decode"]
    assert decode and all(step.is_graph == (backend != "off") for step in decode)


def test_compiled_backends(make_llm, solo) -> None:
    prompts = prompts_of([9, 17])
    expected = [solo(prompt, 6) for prompt in prompts]
    for backend in ("inductor", "piecewise"):
        llm = make_llm(decode_graph=backend, prefill_graph="off", decode_sizes=[2])
        assert generate(llm, prompts, greedy(6)) == expected
        assert all(step.is_graph for step in llm.steps if step.mode.value == "decode")
