"""Pooled hidden states against transformers', whatever the prompt was cut into and whoever ran beside it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_driver import VOCAB_SIZE, generate, greedy, pool_check, prompts_of, tokens

from graphrunner import LLM
from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.pooling import Pooling, unit_vector
from graphrunner.engine.output_processor import RequestOutputKind

LENGTHS = [1, 7, 30, 128]


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> Callable[[list[int], str], torch.Tensor]:
    """fp32 [hidden_size]: transformers' last hidden state (after the final norm), pooled."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()

    def pool(prompt: list[int], pooling: str) -> torch.Tensor:
        with torch.inference_mode():
            hidden = model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        return hidden.mean(0) if pooling == "mean" else hidden[-1]

    return pool


def embed(llm: LLM, prompts: list[list[int]], pooling: str, *, normalize: bool = False) -> list[torch.Tensor]:
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.embed(given, pooling=pooling, normalize=normalize, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    return [torch.tensor(output.outputs.embedding) for output in outputs]


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 11, "overlap": True},
        {"decode_graph": "recording", "prefill_graph": "recording", "decode_sizes": [1, 4], "prefill_sizes": [16, 64]},
        {"model_impl": "transformers", "max_num_batched_tokens": 9},
    ],
    ids=["whole", "chunks", "chunks-overlap", "graphs", "transformers"],
)
def test_parity(make_llm, expected, options: dict[str, object], pooling: str) -> None:
    """Every length at once, a prompt that fills the context among them."""
    llm = make_llm(**options)
    prompts = prompts_of(LENGTHS)
    for prompt, vector in zip(prompts, embed(llm, prompts, pooling), strict=True):
        torch.testing.assert_close(vector, expected(prompt, pooling), rtol=1e-4, atol=1e-4)
    pool_check(llm)


def test_recordings_take_prompts_to_pool(make_llm, expected) -> None:
    llm = make_llm(prefill_graph="recording", prefill_sizes=[16, 64])
    prompts = prompts_of([12, 40])
    for prompt in prompts:
        (vector,) = embed(llm, [prompt], "mean")
        torch.testing.assert_close(vector, expected(prompt, "mean"), rtol=1e-4, atol=1e-4)
    assert [(step.is_graph, step.key.num_tokens) for step in llm.steps] == [(True, 16), (True, 64)]


def test_length_one(make_llm, expected) -> None:
    llm = make_llm()
    (vector,) = embed(llm, prompts_of([9]), "mean", normalize=True)
    wanted = torch.nn.functional.normalize(expected(prompts_of([9])[0], "mean"), dim=0)
    torch.testing.assert_close(vector, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
def test_beside_generation(make_llm, expected, solo, overlap: bool) -> None:
    """Chunks of prompts to pool share steps with requests that decode; neither notices."""
    llm = make_llm(max_num_batched_tokens=12, overlap=overlap, prompts_first=False)
    prompts = prompts_of([6, 25, 40, 3], seed=8)
    engine = llm.engine
    for index, prompt in enumerate(prompts[:2]):
        engine.add_request(f"g{index}", prompt, greedy(12), output_kind=RequestOutputKind.FINAL_ONLY)
    engine.step()
    engine.add_embedding_request("e0", prompts[2], Pooling.MEAN)
    engine.add_embedding_request("e1", prompts[3], Pooling.LAST)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step()}
    for index, prompt in enumerate(prompts[:2]):
        assert tokens(done[f"g{index}"]) == solo(prompt, 12) and done[f"g{index}"].embedding is None
    for name, prompt, pooling in (("e0", prompts[2], "mean"), ("e1", prompts[3], "last")):
        torch.testing.assert_close(torch.tensor(done[name].embedding), expected(prompt, pooling), rtol=1e-4, atol=1e-4)
        assert done[name].finished and done[name].outputs[0].token_ids == []
        assert done[name].outputs[0].finish_reason == "stop"
    pool_check(llm)


def test_after_preemption(make_llm, expected, solo) -> None:
    """A prompt that lost its pages half-way is summed from its start again."""
    llm = make_llm(num_pages=10, page_size=4, max_num_batched_tokens=6, max_num_seqs=4, prompts_first=False)
    prompts = prompts_of([4, 20], seed=2)
    engine = llm.engine
    engine.add_request("old", prompts[0], greedy(24), output_kind=RequestOutputKind.FINAL_ONLY, priority=0)
    engine.step()
    engine.add_embedding_request("e", prompts[1], Pooling.MEAN, priority=1)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step()}
    torch.testing.assert_close(torch.tensor(done["e"].embedding), expected(prompts[1], "mean"), rtol=1e-4, atol=1e-4)
    assert tokens(done["old"]) == solo(prompts[0], 24)
    pool_check(llm)


def test_refused_and_aborted(make_llm) -> None:
    """A bad one of several leaves none behind, and an aborted one gives its pages back."""
    llm = make_llm(max_num_batched_tokens=4)
    good, too_long = prompts_of([5, 129])
    for bad, name in (([VOCAB_SIZE], "prompt"), ([], "prompt"), (too_long, "prompt")):
        with pytest.raises(InvalidRequestError, match=name):
            llm.embed([{"prompt_token_ids": good}, {"prompt_token_ids": bad}], use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()
    with pytest.raises(InvalidRequestError, match="pooling='max'"):
        llm.embed([{"prompt_token_ids": good}], pooling="max")
    llm.engine.add_embedding_request("gone", good)
    llm.engine.step()
    assert llm.engine.abort_request("gone")
    assert generate(llm, [good], greedy(3))
    pool_check(llm)


def test_unit_vector() -> None:
    assert unit_vector([3.0, 4.0]) == [0.6, 0.8]
    assert unit_vector([0.0, 0.0]) is None and unit_vector([float("nan"), 1.0]) is None


def test_counted(make_llm) -> None:
    llm = make_llm(max_num_batched_tokens=4)
    embed(llm, prompts_of([5, 9]), "mean")
    text = llm.engine.metrics.text().decode()
    assert "graphrunner_prompt_tokens_total 14.0" in text
    assert 'graphrunner_requests_finished_total{reason="stop"} 2.0' in text
