"""Speculation under every sampling parameter: the very tokens of plain sampling, or their distribution."""

from collections.abc import Sequence

import pytest
import torch
from batches import fake_logits, generate, row_init

from graphrunner.core.outputs import ModelOutput
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.scheduled_batch import RowInit, SamplingNeed, ScheduledBatch
from graphrunner.core.shape_key import ForwardMode, ForwardVariant
from graphrunner.sampling.sampler import Sampler
from graphrunner.sampling.verifier import Verifier

VOCAB = 61
TINY = 6
COUNT = 3000
K = 3


def verify_batch(rows: Sequence[int], lengths: Sequence[int], inits: Sequence[RowInit], width: int) -> ScheduledBatch:
    return ScheduledBatch(
        step_id=0,
        mode=ForwardMode.VERIFY,
        request_ids=tuple(f"r{row}" for row in rows),
        rows=tuple(rows),
        cached_lens=tuple(length - 1 for length in lengths),
        query_lens=(width,) * len(rows),
        input_ids=(),
        samples=(True,) * len(rows),
        sampling_need=SamplingNeed.LOGITS,
        row_inits=tuple(inits),
        num_draft_tokens=(width - 1,) * len(rows),
    )


def speculate(inits: list[RowInit], num_tokens: int, answers: list[list[int]]) -> list[list[int]]:
    """Decode with drafts that are mostly the right ones, at least `num_tokens` tokens each."""
    sampler = Sampler(VOCAB, 1 + len(inits), "cpu")
    verifier, outputs, step = Verifier(sampler), [[] for _ in inits], 0
    while min(map(len, outputs)) < num_tokens:
        sequences = [[*init.prompt_token_ids, *output] for init, output in zip(inits, outputs, strict=True)]
        drafts = []
        for answer, output in zip(answers, outputs, strict=True):
            draft = [*answer[len(output) : len(output) + K], *[0] * K][:K]
            drafts.append([token if (step + place) % 5 else (token + 1) % VOCAB for place, token in enumerate(draft)])
        drafts[0][step % 4 :] = [-1] * (K - min(step % 4, K))
        batch = verify_batch([i.row for i in inits], [len(s) for s in sequences], inits if step == 0 else (), K + 1)
        sampler.apply(batch, frozenset({2}))
        logits = torch.stack(
            [fake_logits(s + d[:place]) for s, d in zip(sequences, drafts, strict=True) for place in range(K + 1)]
        )
        blocks = verifier.verify(ModelOutput(logits=logits), batch, torch.tensor(drafts, dtype=torch.int32))
        for output, block in zip(outputs, blocks.wait_blocks(), strict=True):
            output.extend(block)
        step += 1
    return [output[:num_tokens] for output in outputs]


def test_tokens_of_plain_sampling_with_everything_on() -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_p=0.8, logit_bias={5: 4.0, 6: -100.0}),
        SamplingParams(temperature=0.7, top_k=9, min_p=0.05, repetition_penalty=1.5),
        SamplingParams(temperature=0.0, presence_penalty=1.9, frequency_penalty=1.1),
        SamplingParams(temperature=1.4, min_tokens=12, frequency_penalty=-0.7),
    ]
    inits = [row_init(1 + place, one, seed=100 + place) for place, one in enumerate(params)]
    answers = generate(inits, 24, eos=frozenset({2}))
    assert speculate(inits, 20, answers) == [answer[:20] for answer in answers]


def chi_square(token_ids: torch.Tensor, probs: torch.Tensor) -> float:
    counts = torch.bincount(token_ids.long(), minlength=TINY).double()
    expected = probs.double() * len(token_ids)
    is_possible = expected > 0
    assert counts[~is_possible].sum() == 0, "a token that the filters rule out"
    return float(((counts - expected)[is_possible] ** 2 / expected[is_possible]).sum())


def expected_probs(logits: torch.Tensor, params: SamplingParams, output: Sequence[int]) -> torch.Tensor:
    """What one position draws from, by the definitions, token by token."""
    values = logits.double().clone()
    for token in range(TINY):
        if token in (1, 3, *output):
            values[token] *= 1 / params.repetition_penalty if values[token] > 0 else params.repetition_penalty
        values[token] -= params.presence_penalty * (token in output) + params.frequency_penalty * output.count(token)
        values[token] += (params.logit_bias or {}).get(token, 0.0)
    probs = (values / params.temperature).softmax(0)
    order = probs.argsort(descending=True)
    keep = order[: params.top_k or TINY]
    shares = probs[keep] / probs[keep].sum()
    keep = keep[(shares.cumsum(0) - shares < params.top_p) & (shares >= params.min_p * shares[0])]
    kept = torch.zeros_like(probs)
    kept[keep] = probs[keep]
    return kept / kept.sum()


PARAMS = {
    "temperature": SamplingParams(temperature=1.3),
    "filters": SamplingParams(temperature=0.9, top_k=5, top_p=0.9, min_p=0.05),
    "everything": SamplingParams(
        temperature=0.8, top_k=5, min_p=0.02, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.5,
        frequency_penalty=0.4, logit_bias={4: 1.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("has_probs", [True, False], ids=["drawn", "certain"])
@pytest.mark.parametrize("name", PARAMS)
def test_tokens_follow_the_targets_distribution(name: str, has_probs: bool) -> None:
    params, generator = PARAMS[name], torch.Generator().manual_seed(11)
    raw = torch.tensor(
        [[1.0, 0.2, 0.8, -0.5, 0.1, 0.6], [0.3, 1.1, -0.2, 0.9, 0.4, 0.0], [0.5, 0.1, 0.2, 0.3, 1.2, 0.9]]
    )
    q = torch.tensor([[0.1, 0.1, 0.5, 0.1, 0.1, 0.1], [0.2, 0.1, 0.1, 0.4, 0.1, 0.1]])
    rows = range(1, COUNT + 1)
    draft = torch.stack([torch.multinomial(row, COUNT, replacement=True, generator=generator) for row in q], 1).int()
    if not has_probs:
        draft = torch.tensor([[2, 3]], dtype=torch.int32).expand(COUNT, 2).contiguous()
    inits = [row_init(row, params, seed=row * 977, prompt=(1, 3)) for row in rows]
    sampler = Sampler(TINY, COUNT + 1, "cpu")
    verifier = Verifier(sampler)
    if has_probs:
        verifier.draft_probs = q.expand(COUNT + 1, 2, TINY).contiguous()
    batch = verify_batch(rows, [2] * COUNT, inits, 3)
    sampler.apply(batch)
    logits = raw.repeat(COUNT, 1)
    if name == "everything":  # penalties need the logits outside of the graph
        tokens = verifier.verify(ModelOutput(logits=logits), batch, draft)
        token_ids, num_new = tokens.token_ids, tokens.num_new
    else:
        request_rows = torch.arange(1, COUNT + 1, dtype=torch.int32)
        positions = torch.tensor([1, 2, 3]).repeat(COUNT)
        token_ids, num_new = verifier.accept_in_graph(logits, request_rows, positions, draft, ForwardVariant.SAMPLE)
    # Five degrees of freedom: a chi-square above 40 has a chance of 1.5e-7.
    first = expected_probs(raw[0], params, [])
    assert chi_square(token_ids[:, 0], first) < 40.0
    stands = num_new >= 2
    expected_share = float(torch.minimum(first, q[0].double()).sum()) if has_probs else float(first[2])
    assert float(stands.double().mean()) == pytest.approx(expected_share, abs=0.04)
    for token in range(TINY):
        chosen = stands & (token_ids[:, 0] == token)
        if int(chosen.sum()) > 200:
            assert chi_square(token_ids[chosen, 1], expected_probs(raw[1], params, [token])) < 40.0
    both = (num_new >= 3) & (token_ids[:, 0] == 2) & (token_ids[:, 1] == 3)
    if int(both.sum()) > 200:
        assert chi_square(token_ids[both, 2], expected_probs(raw[2], params, [2, 3])) < 40.0
