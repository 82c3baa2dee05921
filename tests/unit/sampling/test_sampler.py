"""The sampler with its rows: what each request asked for happens to it and to nobody else."""

import math

import pytest
import torch
from batches import VOCAB, decode_batch, fake_logits, generate, row_init
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.sampling_params import SamplingParams, StructuredOutput
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.sampling.logprobs import LOGPROB_FLOOR
from graphrunner.sampling.sampler import Sampler

KINDS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=10),
    SamplingParams(temperature=1.5, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.1, repetition_penalty=1.3),
    SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.4),
    SamplingParams(temperature=1.0, logit_bias={4: 3.0, 9: -5.0}, logprobs=2),
    SamplingParams(temperature=0.0, frequency_penalty=1.5),
)


def one_token(params: SamplingParams, logits: torch.Tensor, **how) -> int:
    return generate([row_init(1, params, **how)], 1, logits_of=lambda _: logits)[0][0]


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(8)), st.integers(0, 2**62))
def test_alone_or_in_a_batch_in_any_order(order, seed):
    inits = [row_init(row + 1, KINDS[row], seed=seed + row, prompt=(row, 5)) for row in range(8)]
    together = generate([inits[place] for place in order], 5)
    for place, output in zip(order, together, strict=True):
        assert generate([inits[place]], 5) == [output]


def test_seeds_repeat_and_differ():
    params = SamplingParams(temperature=1.0)
    runs = [generate([row_init(1, params, seed=seed)], 12)[0] for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]


def test_one_request_many_seeds_differ():
    params = SamplingParams(temperature=1.0)
    outputs = generate([row_init(row, params, seed=row * 1000003) for row in range(1, 17)], 8)
    assert len(set(map(tuple, outputs))) >= 15


@pytest.mark.parametrize("params", KINDS, ids=str)
def test_resumed_after_preemption_goes_on_the_same(params):
    whole = generate([row_init(1, params, seed=3)], 10)[0]
    resumed = generate([row_init(2, params, seed=3, output=whole[:4])], 6)[0]
    assert resumed == whole


def test_in_graph_and_outside_agree():
    inits = [row_init(row + 1, KINDS[row % 4], seed=row) for row in range(8)]
    sampler = Sampler(VOCAB, 9, "cpu")
    batch = decode_batch(range(1, 9), [4] * 8, inits)
    sampler.apply(batch)
    logits = torch.stack([fake_logits([row]) for row in range(8)])
    inside = sampler.sample_in_graph(
        logits, torch.arange(1, 9, dtype=torch.int32), torch.full((8,), 4, dtype=torch.int32), ForwardVariant.SAMPLE
    )
    assert inside.dtype == torch.int32
    assert sampler.sample(ModelOutput(logits=logits), batch).wait() == inside.tolist()


def test_tokens_made_in_the_forward_are_cut_to_the_sampled_rows():
    sampler = Sampler(VOCAB, 5, "cpu")
    batch = decode_batch([1, 2, 3], [9, 9, 9], samples=[True, False, True])
    made = torch.tensor([11, 12, 13], dtype=torch.int32)
    tokens = sampler.sample(ModelOutput(token_ids=made), batch)
    made.zero_()  # graph memory is overwritten by the next replay
    assert tokens.wait() == [11, 13]


def test_rows_that_do_not_sample_are_left_out():
    sampler = Sampler(VOCAB, 5, "cpu")
    greedy = SamplingParams(temperature=0.0)
    batch = decode_batch(
        [1, 2, 3], [9, 9, 9], [row_init(row, greedy) for row in (1, 2, 3)], samples=[False, True, False]
    )
    sampler.apply(batch)
    logits = torch.eye(VOCAB)[[4, 5, 6]]
    assert sampler.sample(ModelOutput(logits=logits), batch).wait() == [5]
    nobody = decode_batch([1, 2], [9, 9], samples=[False, False])
    assert sampler.sample(ModelOutput(logits=logits[:2]), nobody).wait() == []


def test_a_row_used_again_keeps_nothing():
    sampler = Sampler(VOCAB, 2, "cpu")
    loud = SamplingParams(temperature=0.0, logit_bias={5: 100.0}, frequency_penalty=2.0, logprobs=3)
    generate([row_init(1, loud)], 3, sampler=sampler)
    plain = row_init(1, SamplingParams(temperature=0.0))
    assert generate([plain], 4, sampler=sampler) == generate([plain], 4)


def test_top_k_one_is_greedy_even_among_equals():
    logits = torch.zeros(VOCAB)
    logits[[20, 40]] = 3.0
    for seed in range(20):
        assert one_token(SamplingParams(temperature=5.0, top_k=1), logits, seed=seed) == 20


def test_bias_forces_and_forbids():
    logits = fake_logits([1])
    best = int(logits.argmax())
    assert one_token(SamplingParams(temperature=0.0, logit_bias={33: 100.0}), logits) == 33
    assert one_token(SamplingParams(temperature=0.0, logit_bias={best: -100.0}), logits) != best
    for seed in range(20):
        assert one_token(SamplingParams(temperature=1.0, logit_bias={33: 100.0}), logits, seed=seed) == 33
    assert one_token(SamplingParams(temperature=0.0, logit_bias={}), logits) == best


def test_penalties_against_the_definition():
    params = SamplingParams(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.6, frequency_penalty=0.3)
    init = row_init(1, params, prompt=(1, 2, 2, 50))
    sequence, expected = list(init.prompt_token_ids), []
    for _ in range(20):
        logits = fake_logits(sequence).tolist()
        for token in range(VOCAB):
            count = expected.count(token)
            if token in sequence:
                logits[token] = logits[token] / 1.7 if logits[token] > 0 else logits[token] * 1.7
            logits[token] -= 0.6 * (count > 0) + 0.3 * count
        best = max(range(VOCAB), key=lambda token: logits[token])
        expected.append(best)
        sequence.append(best)
    assert generate([init], 20) == [expected]


def test_penalties_grow_past_the_first_slots():
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    inits = [row_init(row, params, prompt=(row,)) for row in range(1, 14)]
    together = generate(inits, 6)
    assert together == [generate([init], 6)[0] for init in inits]


def test_frequency_penalty_counts_output_only():
    logits = torch.zeros(VOCAB)
    logits[7] = 1.0
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    assert generate([row_init(1, params, prompt=(7, 7))], 2, logits_of=lambda _: logits)[0] == [7, 0]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_holds_stops_back(ignore_eos):
    logits = torch.zeros(VOCAB)
    logits[[3, 4, 5]] = torch.tensor([9.0, 8.0, 7.0])
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[4], ignore_eos=ignore_eos)
    init = row_init(1, params)
    output = generate([init], 5, logits_of=lambda _: logits, eos=frozenset({3}))[0]
    # A stop may be the token that reaches min_tokens only once that many tokens stand before it.
    assert output == ([3] * 5 if ignore_eos else [5, 5, 5, 3, 3])


def test_logprobs_are_of_the_raw_logits():
    logits = fake_logits([4])
    params = SamplingParams(temperature=0.3, logprobs=4, logit_bias={6: 100.0}, repetition_penalty=1.5)
    sampler = Sampler(VOCAB, 3, "cpu")
    plain = row_init(1, SamplingParams(temperature=0.0))
    batch = decode_batch([1, 2], [4, 4], [plain, row_init(2, params)])
    sampler.apply(batch)
    tokens = sampler.sample(ModelOutput(logits=logits.expand(2, -1)), batch)
    assert tokens.wait()[1] == 6 and tokens.logprobs[0] is None and len(tokens.logprobs) == 2
    entry = tokens.logprobs[1][0]
    expected = torch.log_softmax(logits.double(), -1)
    assert entry.token_id == 6 and entry.logprob == pytest.approx(float(expected[6]), abs=1e-5)
    assert entry.rank == int((logits > logits[6]).sum()) + 1
    best = expected.topk(4)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_all_logprobs_sum_to_one_and_stay_finite():
    logits = torch.full((VOCAB,), -math.inf)
    logits[:20] = fake_logits([1])[:20]
    sampler = Sampler(VOCAB, 2, "cpu")
    batch = decode_batch([1], [4], [row_init(1, SamplingParams(logprobs=20))])
    sampler.apply(batch)
    entry = sampler.sample(ModelOutput(logits=logits[None]), batch).logprobs[0][0]
    assert sum(math.exp(logprob) for _, logprob in entry.top) == pytest.approx(1.0, abs=1e-5)
    logits[1:] = -math.inf
    entry = sampler.sample(ModelOutput(logits=logits[None]), batch).logprobs[0][0]
    assert entry.top[0] == (0, 0.0) and entry.top[5][1] == LOGPROB_FLOOR


def prompt_entries(chunks: list[int], prompt: tuple[int, ...]):
    """Prompt logprobs of a prompt that is computed chunk by chunk, next to a decode row."""
    sampler = Sampler(VOCAB, 3, "cpu")
    sampler.logits_of = lambda hidden: hidden * 2
    inits = [
        row_init(1, SamplingParams(temperature=0.0)),
        row_init(2, SamplingParams(prompt_logprobs=3), prompt=prompt),
    ]
    found, done = {}, 0
    for chunk in chunks:
        is_last = done + chunk == len(prompt)
        batch = decode_batch(
            [1, 2], [9, done + chunk], inits if not done else (), samples=[True, is_last], query_lens=[1, chunk],
            needs_all_logits=True,
        )  # fmt: skip
        sampler.apply(batch)
        logits = torch.stack([fake_logits([0]), *(fake_logits(prompt[: i + 1]) for i in range(done, done + chunk))])
        tokens = sampler.sample(ModelOutput(logits=logits[[0, -1]], hidden_states=logits / 2), batch)
        assert len(tokens.wait()) == 1 + is_last
        if tokens.prompt_logprobs and tokens.prompt_logprobs[1]:
            first, entries = tokens.prompt_logprobs[1]
            found |= {first + offset: entry for offset, entry in enumerate(entries)}
        done += chunk
    return found


def test_prompt_logprobs_in_chunks_equal_whole():
    prompt = tuple((i * 17) % VOCAB for i in range(40))
    whole = prompt_entries([40], prompt)
    assert sorted(whole) == list(range(1, 40))
    for position, entry in whole.items():
        expected = torch.log_softmax(fake_logits(prompt[:position]), -1)[prompt[position]]
        assert entry.token_id == prompt[position] and entry.logprob == pytest.approx(float(expected), abs=1e-5)
    assert prompt_entries([8] * 5, prompt) == whole
    assert prompt_entries([1, 38, 1], prompt) == whole


def test_logits_that_are_not_finite_do_not_reach_a_neighbour():
    inits = [row_init(row, KINDS[0], seed=row) for row in (1, 2)]
    broken = lambda sequence: torch.full((VOCAB,), float("nan"))  # noqa: E731
    alone = generate([inits[1]], 4)[0]
    sampler = Sampler(VOCAB, 3, "cpu")
    outputs: list[list[int]] = [[], []]
    for step in range(4):
        sequence = [*inits[1].prompt_token_ids, *outputs[1]]
        batch = decode_batch([1, 2], [len(sequence)] * 2, inits if step == 0 else ())
        sampler.apply(batch)
        logits = torch.stack([broken(sequence), fake_logits(sequence)])
        for output, token in zip(outputs, sampler.sample(ModelOutput(logits=logits), batch).wait(), strict=True):
            output.append(token)
    assert outputs == [[0, 0, 0, 0], alone]


def test_a_grammar_needs_a_tokenizer():
    shape = SamplingParams(structured_output=StructuredOutput(regex="a+"))
    with pytest.raises(InvalidRequestError, match="structured_output"):
        generate([row_init(1, shape)], 1)


def test_tiny_temperature_is_greedy():
    logits = fake_logits([2])
    assert one_token(SamplingParams(temperature=1e-12), logits, seed=4) == int(logits.argmax())
    assert one_token(SamplingParams(temperature=1e-4), logits, seed=4) == int(logits.argmax())


def test_logits_of_a_long_prompt_are_never_there_at_once():
    prompt = tuple((i * 17) % VOCAB for i in range(100))
    sampler, sizes = Sampler(VOCAB, 3, "cpu"), []

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return hidden

    sampler.logits_of = logits_of
    batch = decode_batch(
        [1], [100], [row_init(1, SamplingParams(prompt_logprobs=0), prompt=prompt)], query_lens=[100],
        needs_all_logits=True,
    )  # fmt: skip
    sampler.apply(batch)
    hidden = torch.stack([fake_logits(prompt[: i + 1]) for i in range(100)])
    tokens = sampler.sample(ModelOutput(logits=hidden[-1:], hidden_states=hidden), batch)
    assert len(tokens.prompt_logprobs[0][1]) == 99 and sizes == [32, 32, 32, 3]
