"""The largest step an engine can be asked for, run eagerly on padding: it compiles kernels and shows peak memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphrunner.config.engine_config import SchedulerConfig
from graphrunner.core.scheduled_batch import SamplingNeed, ScheduledBatch
from graphrunner.core.shape_key import ForwardMode, ForwardVariant
from graphrunner.engine.model_runner import ModelRunner
from graphrunner.runner.base_graph_runner import BaseGraphRunner


@torch.inference_mode()
def run_largest_steps(model_runner: ModelRunner, limits: SchedulerConfig) -> None:
    """As many requests as there can be, as few as can hold the most tokens, and the widest verify step.

    Everything is the dummy row's.
    """
    num_tokens = limits.token_budget
    most = min(limits.max_num_seqs, num_tokens)
    least = -(-num_tokens // limits.max_model_len)
    for num_reqs in sorted({most, min(least, most)}):
        _run(model_runner, _prompts(_spread(num_tokens, num_reqs, limits.max_model_len)))
    num_drafts = model_runner.request_table.draft_tokens.shape[1]
    if num_drafts:
        _run(model_runner, _verification(limits.max_num_seqs, num_drafts))


@torch.inference_mode()
def rehearse_prompts(model_runner: ModelRunner, limits: SchedulerConfig) -> None:
    """Have drafts take in prompts of every recorded size that launches kernels of its own.

    The target's part of such a step is recorded; theirs is not, and is met with the first prompt.
    """
    runner = model_runner.prefill_cuda_graph_runner
    if not isinstance(runner, BaseGraphRunner):
        return
    for key in runner.telling_keys():
        num_reqs = min(-(-key.num_tokens // limits.max_model_len), limits.max_num_seqs)
        batch = _prompts(_spread(key.num_tokens, num_reqs, limits.max_model_len))
        views = runner.capture_prepare(key)
        model_runner.take_prompts(batch, views, runner.forward_over(views, key.variant))


def _spread(num_tokens: int, num_reqs: int, limit: int) -> list[int]:
    """Even lengths of at most `limit` that sum up to `num_tokens`, or to what fits."""
    num_tokens = min(num_tokens, num_reqs * limit)
    return [num_tokens // num_reqs + (index < num_tokens % num_reqs) for index in range(num_reqs)]


def _prompts(query_lens: Sequence[int]) -> ScheduledBatch:
    count = len(query_lens)
    return ScheduledBatch(
        step_id=0,
        mode=ForwardMode.PREFILL,
        request_ids=("",) * count,
        rows=(0,) * count,
        cached_lens=(0,) * count,
        query_lens=tuple(query_lens),
        input_ids=(0,) * sum(query_lens),
        samples=(True,) * count,
        sampling_need=SamplingNeed.RANDOM,
    )


def _verification(num_reqs: int, num_drafts: int) -> ScheduledBatch:
    return ScheduledBatch(
        step_id=0,
        mode=ForwardMode.VERIFY,
        request_ids=("",) * num_reqs,
        rows=(0,) * num_reqs,
        cached_lens=(0,) * num_reqs,
        query_lens=(num_drafts + 1,) * num_reqs,
        input_ids=(),
        samples=(True,) * num_reqs,
        sampling_need=SamplingNeed.RANDOM,
        num_draft_tokens=(num_drafts,) * num_reqs,
    )


def _run(model_runner: ModelRunner, batch: ScheduledBatch) -> None:
    runner, sampler = model_runner.eager_runner, model_runner.sampler
    loaded = runner.load_batch(batch)
    logits = runner.execute(loaded).logits
    if logits is None:  # drafts that branch are picked from within the forward
        return
    rows = loaded.batch.request_rows.repeat_interleave(logits.shape[0] // batch.num_reqs)
    for variant in (ForwardVariant.GREEDY, ForwardVariant.SAMPLE):
        sampler.sample_in_graph(logits, rows, torch.ones_like(rows), variant)
