"""The embedded model through the whole engine: golden tokens, text, stop strings."""

import pytest

from graphrunner import LLM, SamplingParams

pytestmark = [pytest.mark.embedded, pytest.mark.xdist_group("embedded")]


@pytest.fixture(scope="module")
def llm():
    with LLM(max_num_seqs=4, max_model_len=256, num_threads=2) as made:
        yield made


def test_raw_prompt(llm: LLM) -> None:
    output = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)[0]
    assert output.outputs[0].token_ids == [7042, 30, 198, 198, 504, 2988, 314, 42]
    assert output.outputs[0].text.startswith(" Paris.")


def test_chat(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=32)
    question = [{"role": "user", "content": "What is the capital of Italy? Answer in one sentence."}]
    output = llm.chat(question, greedy, use_tqdm=False)[0]
    assert len(output.prompt_token_ids) == 42
    assert output.outputs[0].token_ids == [504, 3575, 282, 7158, 314, 7268, 30, 2]
    assert output.outputs[0].text == "The capital of Italy is Rome."
    assert output.outputs[0].finish_reason == "stop"


def test_stop_string_trims_text_and_ends(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, stop=["The ans"], logprobs=2)
    completion = llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0]
    assert completion.text == " Paris.\n\n" and completion.finish_reason == "stop"
    assert completion.stop_reason == "The ans"
    assert len(completion.token_ids) == len(completion.logprobs)


def test_stream_joins_to_the_whole(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    whole = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0]
    parts = list(llm.stream("Once upon a time", params))
    assert "".join(part.outputs[0].text for part in parts) == whole.text
    assert [token for part in parts for token in part.outputs[0].token_ids] == whole.token_ids
    assert [part.outputs[0].finish_reason for part in parts][-1] == "length"
