"""The least sampler that serves a request, from its parameters alone."""

from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.scheduled_batch import SamplingNeed

_ORDER = (SamplingNeed.GREEDY, SamplingNeed.RANDOM, SamplingNeed.LOGITS)
_RANK = {need: rank for rank, need in enumerate(_ORDER)}


def sampling_need_of(params: SamplingParams, has_stop_ids: bool = True) -> SamplingNeed:
    """What sampling one request takes.

    Args:
        params: as the user gave them.
        has_stop_ids: whether any token id could end it; `min_tokens` then has to forbid these ids.
    """
    if (
        params.has_penalties
        or params.logit_bias
        or params.logprobs is not None
        or params.structured_output is not None
        or (params.min_tokens > 0 and has_stop_ids)
    ):
        return SamplingNeed.LOGITS
    return SamplingNeed.GREEDY if params.is_greedy else SamplingNeed.RANDOM


def stronger_need(first: SamplingNeed, second: SamplingNeed) -> SamplingNeed:
    """The one of two needs that serves both."""
    return first if _RANK[first] >= _RANK[second] else second
