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


def test_the_openai_client_on_the_real_model() -> None:
    """The whole product: `graphrunner serve` in a process of its own, the real client in this one."""
    import re
    import signal
    import subprocess
    import sys

    import httpx
    import openai

    command = [sys.executable, "-m", "graphrunner.entrypoints.cli.main", "serve", "--port", "0", "--max-num-seqs", "4"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert server.stderr is not None
        lines = []
        while not (lines and lines[-1].strip() == "ready"):
            lines.append(server.stderr.readline())
            assert lines[-1], "".join(lines)
        found = re.search(r"http://\S+?(?=,|\s)", "".join(lines))
        assert found, lines
        client = openai.OpenAI(
            base_url=f"{found.group()}/v1", api_key="none", http_client=httpx.Client(trust_env=False, timeout=60)
        )
        model = client.models.list().data[0].id
        question = [{"role": "user", "content": "What is the capital of Italy? Answer in one sentence."}]
        reply = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=32)
        assert reply.choices[0].message.content == "The capital of Italy is Rome."
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (42, 8)
        chunks = client.chat.completions.create(
            model=model, messages=question, temperature=0, max_tokens=32, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(parts) == "The capital of Italy is Rome." and len(parts) > 3
        completion = client.completions.create(
            model=model, prompt="The capital of France is", temperature=0, max_tokens=2
        )
        assert completion.choices[0].text == " Paris."
        with_n = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=32, n=2)
        assert {choice.message.content for choice in with_n.choices} == {"The capital of Italy is Rome."}
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0


@pytest.mark.parametrize(("packing", "share"), [("int8", 0.02), ("fp8", 0.10), ("fp8_block", 0.08), ("int4", 0.60)])
def test_packed_weights_keep_the_perplexity(llm: LLM, packing: str, share: float) -> None:
    """Of a fixed text, the licence of this repository. A model of 135M parameters has few to spare for 4 bits."""
    import math
    from pathlib import Path

    text = " ".join((Path(__file__).resolve().parents[2] / "LICENSE").read_text().split())
    ids = llm.engine.tokenizer.encode(text)[:200]

    def perplexity(of: LLM) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        scored = of.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].prompt_logprobs
        return math.exp(-sum(entry[i].logprob for i, entry in zip(ids[1:], scored[1:], strict=True)) / (len(ids) - 1))

    with LLM(max_num_seqs=1, max_model_len=256, quantization=packing, num_threads=2) as packed_llm:
        dense, packed = perplexity(llm), perplexity(packed_llm)
    assert 1.0 < dense < 60.0 and abs(packed / dense - 1.0) < share, (dense, packed)
