"""Small builders: batches of decode rows, and a run of one sampler over given logits."""

from collections.abc import Callable, Sequence

import torch

from graphrunner.core.outputs import ModelOutput
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.scheduled_batch import RowInit, SamplingNeed, ScheduledBatch
from graphrunner.core.shape_key import ForwardMode
from graphrunner.sampling.sampler import Sampler

VOCAB = 61
LogitsOf = Callable[[Sequence[int]], torch.Tensor]


def row_init(
    row: int, params: SamplingParams, *, seed: int = 0, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = ()
) -> RowInit:
    return RowInit(row, f"r{row}", params, seed, tuple(prompt), tuple(output), ())


def decode_batch(
    rows: Sequence[int],
    seq_lens: Sequence[int],
    inits: Sequence[RowInit] = (),
    *,
    samples: Sequence[bool] | None = None,
    query_lens: Sequence[int] | None = None,
    needs_all_logits: bool = False,
) -> ScheduledBatch:
    query_lens = tuple(query_lens or [1] * len(rows))
    return ScheduledBatch(
        step_id=0,
        mode=ForwardMode.MIXED,
        request_ids=tuple(f"r{row}" for row in rows),
        rows=tuple(rows),
        cached_lens=tuple(length - query for length, query in zip(seq_lens, query_lens, strict=True)),
        query_lens=query_lens,
        input_ids=(),
        samples=tuple(samples or [True] * len(rows)),
        sampling_need=SamplingNeed.LOGITS,
        needs_all_logits=needs_all_logits,
        row_inits=tuple(inits),
    )


def fake_logits(token_ids: Sequence[int], vocab_size: int = VOCAB) -> torch.Tensor:
    """Logits [V] that depend on the whole sequence and on nothing else."""
    state = 17
    for token_id in token_ids:
        state = (state * 31 + int(token_id) + 7) % 100003
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(state)) * 2


def generate(
    inits: Sequence[RowInit],
    num_steps: int,
    *,
    logits_of: LogitsOf = fake_logits,
    eos: frozenset[int] = frozenset(),
    sampler: Sampler | None = None,
) -> list[list[int]]:
    """Decode all requests together; the output of each."""
    sampler = sampler or Sampler(VOCAB, 1 + max(init.row for init in inits), "cpu")
    outputs = [list(init.output_token_ids) for init in inits]
    for step in range(num_steps):
        sequences = [[*init.prompt_token_ids, *output] for init, output in zip(inits, outputs, strict=True)]
        batch = decode_batch([init.row for init in inits], [len(s) for s in sequences], inits if step == 0 else ())
        sampler.apply(batch, eos)
        logits = torch.stack([logits_of(sequence) for sequence in sequences])
        for output, token_id in zip(outputs, sampler.sample(ModelOutput(logits=logits), batch).wait(), strict=True):
            output.append(token_id)
    return outputs
