"""Tables: the least sampler, the order of the finish checks, the door, the queue."""

import pytest

from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.pooling import Pooling
from graphrunner.core.request import FinishReason
from graphrunner.core.sampling_params import SamplingParams, StructuredOutput
from graphrunner.core.scheduled_batch import SamplingNeed
from graphrunner.scheduler.admission import QueueFullError
from graphrunner.scheduler.policy import AGEING_STEPS, WaitingQueue, by_age, by_length, choose_victim, split_budget
from graphrunner.scheduler.sampling_need import sampling_need_of, stronger_need
from graphrunner.scheduler.stop_rules import append_tokens, stop_ids_of

GREEDY, RANDOM, LOGITS = SamplingNeed.GREEDY, SamplingNeed.RANDOM, SamplingNeed.LOGITS


@pytest.mark.parametrize(
    ("params", "need"),
    [
        ({"temperature": 0.0}, GREEDY),
        ({"temperature": 0.0, "top_p": 0.5, "seed": 3}, GREEDY),
        ({"temperature": 0.0, "prompt_logprobs": 0}, GREEDY),
        ({}, RANDOM),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3}, RANDOM),
        ({"repetition_penalty": 1.1}, LOGITS),
        ({"presence_penalty": 0.1}, LOGITS),
        ({"frequency_penalty": 0.1}, LOGITS),
        ({"logit_bias": {3: 1.0}}, LOGITS),
        ({"logit_bias": {}}, RANDOM),
        ({"logprobs": 0}, LOGITS),
        ({"min_tokens": 2}, LOGITS),
        ({"structured_output": StructuredOutput(regex="a")}, LOGITS),
    ],
)
def test_sampling_need(params, need) -> None:
    assert sampling_need_of(SamplingParams(**params)) is need


def test_min_tokens_needs_no_logits_when_nothing_can_stop() -> None:
    assert sampling_need_of(SamplingParams(min_tokens=2, ignore_eos=True), has_stop_ids=False) is RANDOM


def test_stronger_need() -> None:
    assert stronger_need(GREEDY, RANDOM) is stronger_need(RANDOM, GREEDY) is RANDOM
    assert stronger_need(LOGITS, RANDOM) is LOGITS


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("params", "max_tokens", "block", "kept", "reason", "stop_reason"),
    [
        ({}, 4, [7, 8], [7, 8], None, None),
        ({}, 4, [7, 8, 2, 9, 9], [7, 8, 2], STOP, None),
        ({}, 4, [7, 8, 9, 9, 2], [7, 8, 9, 9], LENGTH, None),
        ({}, 3, [7, 8, 2], [7, 8, 2], STOP, None),
        ({"ignore_eos": True}, 4, [7, 2, 9], [7, 2, 9], None, None),
        ({"stop_token_ids": [8]}, 4, [7, 8, 9], [7, 8], STOP, 8),
        ({"stop_token_ids": [2]}, 4, [2], [2], STOP, None),
        ({"stop_token_ids": [2], "ignore_eos": True}, 4, [2], [2], STOP, 2),
        ({"min_tokens": 3}, 4, [2, 2, 2, 9], [2, 2, 2], STOP, None),
        ({"min_tokens": 3, "stop_token_ids": [7]}, 4, [7, 7], [7, 7], None, None),
        ({"min_tokens": 3}, 3, [2, 2, 7], [2, 2, 7], LENGTH, None),
        ({}, 1, [7, 8, 9], [7], LENGTH, None),
    ],
)
def test_finish_checks_in_order(make_request, *, params, max_tokens, block, kept, reason, stop_reason) -> None:
    request = make_request(max_tokens=max_tokens, params=params)
    request.stop_ids = stop_ids_of(request)
    assert append_tokens(request, block) is reason
    assert request.output_token_ids == kept
    assert request.stop_reason == stop_reason


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_blocks_are_cut_at_the_limit(make_request, max_tokens) -> None:
    request = make_request(max_tokens=max_tokens)
    reason = None
    while reason is None:
        reason = append_tokens(request, [7] * 5)
    assert reason is LENGTH and request.output_token_ids == [7] * max_tokens


def test_limit_below_min_tokens_still_ends(make_request) -> None:
    request = make_request(max_tokens=5, params={"min_tokens": 5})
    request.max_new_tokens = 2
    assert append_tokens(request, [7, 7, 7]) is LENGTH


@pytest.mark.parametrize(
    ("prompt_len", "limits", "numbers"),
    [
        (0, {}, "at least one token"),
        (64, {}, "64 tokens.*context of 64 tokens"),
        (10_000, {}, "10000 tokens.*context of 64 tokens"),
        (12, {"num_pages": 4}, "12 tokens.*KV pool of 12 tokens"),
        (20, {"max_pages_per_row": 5}, "20 tokens.*KV pool of 20 tokens"),
    ],
)
def test_refused_at_the_door(make_scheduler, make_request, prompt_len, limits, numbers) -> None:
    scheduler = make_scheduler(**limits)
    with pytest.raises(InvalidRequestError, match=numbers):
        scheduler.add(make_request(prompt_len=prompt_len))
    assert not scheduler.has_unfinished_requests() and scheduler.schedule() is None


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "limits", "max_new_tokens"),
    [
        (63, 5, {}, 1),
        (62, 1, {}, 1),
        (62, 99, {}, 2),
        (4, 99, {"num_pages": 4}, 8),
        (4, 99, {"max_pages_per_row": 2}, 4),
    ],
)
def test_output_is_capped_at_the_door(
    make_scheduler, make_request, *, prompt_len, max_tokens, limits, max_new_tokens
) -> None:
    request = make_request(prompt_len=prompt_len, max_tokens=max_tokens)
    make_scheduler(**limits).add(request)
    assert request.max_new_tokens == max_new_tokens


def test_pooled_prompt_may_fill_the_context(make_scheduler, make_request) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt_len=64, pooling=Pooling.MEAN))
    with pytest.raises(InvalidRequestError):
        scheduler.add(make_request("b", prompt_len=65, pooling=Pooling.MEAN))


def test_duplicate_id_is_refused_while_live(make_scheduler, make_request) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    with pytest.raises(InvalidRequestError, match="request_id='a'"):
        scheduler.add(make_request("a"))
    scheduler.finish("a", FinishReason.ABORT)
    scheduler.add(make_request("a"))


def test_full_queue_has_its_own_error(make_scheduler, make_request) -> None:
    scheduler = make_scheduler(max_queue_len=2)
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b"))
    with pytest.raises(QueueFullError, match="max_queue_len=2"):
        scheduler.add(make_request("c"))
    scheduler.schedule()
    scheduler.add(make_request("c"))


@pytest.mark.parametrize(
    ("num_tokens", "step_id", "shares"),
    [(8, 0, (4, 4)), (8, 1, (4, 4)), (7, 0, (3, 4)), (7, 1, (4, 3)), (1, 0, (0, 1)), (1, 1, (1, 0))],
)
def test_budget_halves(num_tokens, step_id, shares) -> None:
    assert split_budget(num_tokens, step_id) == shares


def queued(make_request, request_id, prompt_len, arrival_index, *, queued_step=0, priority=0):
    request = make_request(request_id, prompt_len, priority=priority)
    request.arrival_index, request.queued_step = arrival_index, queued_step
    return request


def test_queue_orders(make_request) -> None:
    queue = WaitingQueue()
    old = queued(make_request, "old", 9, 0)
    short = queued(make_request, "short", 2, 1)
    urgent = queued(make_request, "urgent", 9, 2, queued_step=AGEING_STEPS - 1, priority=-1)
    late_urgent = queued(make_request, "late", 1, 3, queued_step=AGEING_STEPS + 1, priority=-1)
    for request in (late_urgent, urgent, short, old):
        queue.add(request)
    for order, expected in (
        (by_age, [urgent, old, short, late_urgent]),
        (by_length, [late_urgent, urgent, short, old]),
    ):
        seen = []
        while (request := queue.first(order)) is not None:
            queue.remove(request)
            seen.append(request)
        assert seen == expected
        for request in seen:
            queue.add(request)
    assert len(queue) == 4 and old in queue and None not in queue


def test_queue_forgets_removed_requests(make_request) -> None:
    queue = WaitingQueue()
    last = queued(make_request, "last", 1, 10_000)
    queue.add(last)
    for index in range(500):
        request = queued(make_request, str(index), 50, index)
        queue.add(request)
        queue.remove(request)
    assert all(len(heap) < 50 for heap in queue._heaps.values())
    assert queue.first(by_age) is queue.first(by_length) is last
    with pytest.raises(AssertionError, match="queued twice"):
        queue.add(last)


def test_victim_is_the_worst_priority_then_the_latest(make_request) -> None:
    first, second = queued(make_request, "a", 4, 0), queued(make_request, "b", 4, 1)
    humble = queued(make_request, "c", 4, 0, priority=1)
    assert choose_victim([first, second]) is second
    assert choose_victim([first, humble, second]) is humble
