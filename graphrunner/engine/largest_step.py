"""The largest step an engine can be asked for, run eagerly on padding: it compiles kernels and shows peak memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphrunner.config.engine_config import SchedulerConfig
from graphrunner.core.scheduled_batch import SamplingNeed, ScheduledBatch
from graphrunner.core.shape_key import ForwardMode, ForwardVariant
from graphrunner.engine.model_runner import ModelRunner


@torch.inference_mode()
def run_largest_steps(model_runner: ModelRunner, limits: SchedulerConfig) -> None:
    """As many requests as there can be, then as few as can hold the most tokens. Everything is the dummy row's."""
    num_tokens = limits.token_budget
    most = min(limits.max_num_seqs, num_tokens)
    least = -(-num_tokens // limits.max_model_len)
    for num_reqs in sorted({most, min(least, most)}):
        _run(model_runner, _spread(num_tokens, num_reqs, limits.max_model_len))


def _spread(num_tokens: int, num_reqs: int, limit: int) -> list[int]:
    """Even lengths of at most `limit` that sum up to `num_tokens`, or to what fits."""
    num_tokens = min(num_tokens, num_reqs * limit)
    return [num_tokens // num_reqs + (index < num_tokens % num_reqs) for index in range(num_reqs)]


def _run(model_runner: ModelRunner, query_lens: Sequence[int]) -> None:
    batch = ScheduledBatch(
        step_id=0,
        mode=ForwardMode.PREFILL,
        request_ids=("",) * len(query_lens),
        rows=(0,) * len(query_lens),
        cached_lens=(0,) * len(query_lens),
        query_lens=tuple(query_lens),
        input_ids=(0,) * sum(query_lens),
        samples=(True,) * len(query_lens),
        sampling_need=SamplingNeed.RANDOM,
    )
    runner, sampler = model_runner.eager_runner, model_runner.sampler
    loaded = runner.load_batch(batch)
    output = runner.execute(loaded)
    sampler.sample(output, batch).wait()
    assert output.logits is not None
    views = loaded.batch
    sampler.sample_in_graph(output.logits, views.request_rows, views.seq_lens, ForwardVariant.SAMPLE)
