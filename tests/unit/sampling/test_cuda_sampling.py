"""On a GPU: the kernels pick what the plain functions pick, inside a captured graph too, without a sync."""

import pytest
import torch
from batches import decode_batch, fake_logits, generate, row_init

from graphrunner.core.outputs import ModelOutput
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.sampling.sampler import Sampler

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH = 5003
KINDS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=10),
    SamplingParams(temperature=1.5, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0.6, top_k=40, top_p=0.9, min_p=0.05),
)
PENALTIES = SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4)


def wide_logits(sequence) -> torch.Tensor:
    return fake_logits(sequence, WIDTH)


def samplers(kinds, count: int):
    inits = [row_init(row, kinds[row % len(kinds)], seed=row * 31) for row in range(1, count + 1)]
    made = {device: Sampler(WIDTH, count + 1, device) for device in ("cpu", "cuda")}
    batch = decode_batch([init.row for init in inits], [5 + init.row for init in inits], inits)
    for sampler in made.values():
        sampler.apply(batch)
    return made, batch


def test_kernels_pick_what_the_functions_pick():
    made, batch = samplers(KINDS, 96)
    logits = torch.stack([wide_logits([row]) for row in batch.rows])
    host = made["cpu"].sample(ModelOutput(logits=logits), batch).wait()
    assert made["cuda"].sample(ModelOutput(logits=logits.cuda()), batch).wait() == host


def test_a_replayed_graph_picks_the_same():
    made, batch = samplers(KINDS, 12)
    rows = torch.tensor(batch.rows, dtype=torch.int32, device="cuda")
    lens = torch.zeros_like(rows)
    logits = torch.zeros(12, WIDTH, device="cuda")
    picked = {}
    for variant in (ForwardVariant.GREEDY, ForwardVariant.SAMPLE):
        made["cuda"].sample_in_graph(logits, rows, lens, variant)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            picked[variant] = (graph, made["cuda"].sample_in_graph(logits, rows, lens, variant))
    for step in range(3):
        fresh = torch.stack([wide_logits([row, step]) for row in batch.rows])
        logits.copy_(fresh)
        lens.copy_(torch.tensor(batch.cached_lens) + 1 + step)
        for variant, (graph, tokens) in picked.items():
            graph.replay()
            expected = made["cpu"].sample_in_graph(fresh, rows.cpu(), lens.cpu(), variant)
            assert tokens.tolist() == expected.tolist()


def test_penalties_and_bias_agree_with_the_cpu():
    kinds = (
        PENALTIES,
        SamplingParams(temperature=0.0, frequency_penalty=1.5, logit_bias={3: 4.0}, logprobs=2),
        KINDS[2],
    )
    inits = [row_init(row, kinds[row % 3], seed=row) for row in range(1, 7)]

    def run(device: str) -> list[list[int]]:
        sampler = Sampler(WIDTH, 7, device)
        return generate(inits, 8, logits_of=lambda sequence: wide_logits(sequence).to(device), sampler=sampler)

    assert run("cpu") == run("cuda")


def test_no_sync_until_the_tokens_are_read():
    made, batch = samplers((*KINDS, PENALTIES, SamplingParams(logit_bias={1: 2.0}, logprobs=3)), 16)
    logits = torch.randn(16, WIDTH, device="cuda")
    made["cuda"].sample(ModelOutput(logits=logits), batch).wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made["cuda"].apply(batch)
        tokens = made["cuda"].sample(ModelOutput(logits=logits), batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(tokens.wait()) == 16 and tokens.logprobs[6][0].token_id == tokens.wait()[6]
