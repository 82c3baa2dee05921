"""What single steps look like: columns, deltas, overlap, preemption, counters."""

import subprocess
import sys
import time

import pytest

from graphrunner.core.pooling import Pooling
from graphrunner.core.request import FinishReason, RequestStatus
from graphrunner.core.scheduled_batch import PageAppend, SamplingNeed
from graphrunner.core.shape_key import ForwardMode


def run_step(scheduler, token=7):
    batch = scheduler.schedule()
    updates = scheduler.update(batch, [token] * sum(batch.samples))
    scheduler.check_invariants()
    return batch, updates


def test_prompt_then_decode(make_scheduler, make_request) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_len=5, seed=3))
    batch, (update,) = run_step(scheduler)
    assert batch.mode is ForwardMode.PREFILL and batch.step_id == 0
    assert (batch.rows, batch.cached_lens, batch.query_lens) == ((1,), (0,), (5,))
    assert batch.input_ids == (10, 11, 12, 13, 14) and batch.samples == (True,)
    (init,) = batch.row_inits
    assert (init.row, init.request_id, init.seed, init.output_token_ids) == (1, "a", 3, ())
    assert init.prompt_token_ids == batch.input_ids and len(init.pages) == 2 and 0 not in init.pages
    assert (update.request_id, update.new_token_ids, update.finish_reason) == ("a", (7,), None)
    batch, _ = run_step(scheduler)
    assert batch.mode is ForwardMode.DECODE and batch.step_id == 1
    assert (batch.cached_lens, batch.query_lens, batch.input_ids) == ((5,), (1,), ())
    assert batch.row_inits == batch.page_appends == ()


def test_one_token_prompt_is_a_prefill(make_scheduler, make_request) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt_len=1))
    batch, _ = run_step(scheduler)
    assert batch.mode is ForwardMode.PREFILL and batch.input_ids == (10,)


def test_chunks_share_the_step_with_decode_rows(make_scheduler, make_request) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", prompt_len=3))
    run_step(scheduler)
    scheduler.add(make_request("b", prompt_len=10, first=30))
    batch, updates = run_step(scheduler)
    assert batch.mode is ForwardMode.MIXED and batch.request_ids == ("a", "b")
    assert batch.query_lens == (1, 7) and batch.samples == (True, False)
    assert batch.input_ids == (-1, *range(30, 37))
    assert [update.new_token_ids for update in updates] == [(7,), ()]
    batch, updates = run_step(scheduler)
    assert batch.cached_lens == (4, 7) and batch.query_lens == (1, 3) and batch.samples == (True, True)
    assert batch.row_inits == ()
    batch, _ = run_step(scheduler)
    assert batch.mode is ForwardMode.DECODE and batch.rows == (2, 1), "the longest first"


def test_decode_rows_grow_by_a_page_at_the_border(make_scheduler, make_request) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_len=6))
    batch, _ = run_step(scheduler)
    owned = list(batch.row_inits[0].pages)
    appends = [run_step(scheduler)[0].page_appends for _ in range(4)]
    assert [len(append) for append in appends] == [0, 0, 1, 0]
    assert appends[2] == (PageAppend(row=1, start=2, pages=appends[2][0].pages),)
    assert appends[2][0].pages[0] not in owned


def test_prompt_that_fills_its_pages_gets_the_next_one_with_them(make_scheduler, make_request) -> None:
    """A page for the first new token: a request is not let in only to be preempted in its second step."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_len=8))
    scheduler.add(make_request("b", prompt_len=8, max_tokens=1, first=50))  # never writes a ninth token
    batch, _ = run_step(scheduler)
    assert [len(init.pages) for init in batch.row_inits] == [3, 2]


def test_columns_of_an_unchanged_batch_are_reused(make_scheduler, make_request) -> None:
    scheduler = make_scheduler()
    for request_id in "ab":
        scheduler.add(make_request(request_id))
    run_step(scheduler)
    first, _ = run_step(scheduler)
    second, _ = run_step(scheduler)
    for column in ("request_ids", "rows", "query_lens", "samples"):
        assert getattr(first, column) is getattr(second, column)
    assert second.cached_lens == (5, 5)


def test_rows_are_stable_and_the_lowest_free_one_is_next(make_scheduler, make_request) -> None:
    scheduler = make_scheduler()
    for request_id in "abc":
        scheduler.add(make_request(request_id))
    assert run_step(scheduler)[0].rows == (1, 2, 3)
    scheduler.finish("a", FinishReason.ABORT)
    scheduler.add(make_request("d"))
    batch, _ = run_step(scheduler)
    assert dict(zip(batch.request_ids, batch.rows, strict=True)) == {"b": 2, "c": 3, "d": 1}


def test_no_more_requests_run_than_seats_or_tokens(make_scheduler, make_request) -> None:
    for config in ({"max_num_seqs": 2}, {"max_num_batched_tokens": 2}):
        scheduler = make_scheduler(**config)
        for request_id in "abc":
            scheduler.add(make_request(request_id, prompt_len=2))
        for _ in range(5):
            batch, _ = run_step(scheduler)
            assert batch.num_tokens <= 16 and len(batch.rows) <= 2
        assert (scheduler.stats().num_running, scheduler.stats().num_waiting) == (2, 1)


@pytest.mark.parametrize(
    ("params", "need"),
    [
        ([{}, {}], SamplingNeed.GREEDY),
        ([{}, {"temperature": 1.0}], SamplingNeed.RANDOM),
        ([{"temperature": 1.0}, {"logprobs": 1}], SamplingNeed.LOGITS),
    ],
)
def test_the_batch_needs_what_its_neediest_row_needs(make_scheduler, make_request, params, need) -> None:
    scheduler = make_scheduler()
    for index, one in enumerate(params):
        scheduler.add(make_request(str(index), params=one))
    assert run_step(scheduler)[0].sampling_need is need
    assert run_step(scheduler)[0].sampling_need is need


def test_rows_that_do_not_sample_need_no_sampler(make_scheduler, make_request) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request(prompt_len=6, params={"logprobs": 1}))
    assert run_step(scheduler)[0].sampling_need is SamplingNeed.GREEDY
    assert run_step(scheduler)[0].sampling_need is SamplingNeed.LOGITS


def test_prompt_logprobs_take_no_prefix_hit(make_scheduler, make_request) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    for request_id in "ab":
        request = make_request(request_id, prompt_len=12, max_tokens=2, params={"prompt_logprobs": 1})
        scheduler.add(request)
        steps = [run_step(scheduler)[0] for _ in range(3)]
        assert [step.needs_all_logits for step in steps] == [True, True, False]
        assert [step.num_tokens for step in steps] == [8, 4, 1]
        assert request.num_cached_tokens == 0 and request.is_finished
    plain = make_request("c", prompt_len=12)
    scheduler.add(plain)
    batch, _ = run_step(scheduler)
    assert plain.num_cached_tokens == 8 and batch.cached_lens == (8,) and not batch.needs_all_logits


def test_pooling_request_ends_with_its_prompt(make_scheduler, make_request) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("a", prompt_len=6, pooling=Pooling.MEAN))
    batch, (update,) = run_step(scheduler)
    assert batch.needs_hidden_states and batch.samples == (False,) and update.finish_reason is None
    batch, (update,) = run_step(scheduler)
    assert batch.needs_hidden_states and batch.samples == (False,)
    assert update.finish_reason is FinishReason.STOP and update.new_token_ids == ()
    assert scheduler.schedule() is None and not scheduler.has_unfinished_requests()


def test_overlap_plans_with_tokens_on_the_way(make_scheduler, make_request) -> None:
    scheduler = make_scheduler()
    request = make_request(max_tokens=3)
    scheduler.add(request)
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert [batch.cached_lens for batch in (first, second, third)] == [(0,), (4,), (5,)]
    assert request.num_pending_tokens == 3
    assert scheduler.schedule() is None, "the third token reaches the limit"
    for batch, token in ((first, 7), (second, 8)):
        assert scheduler.update(batch, [token])[0].finish_reason is None
    (update,) = scheduler.update(third, [9])
    assert update.finish_reason is FinishReason.LENGTH and request.output_token_ids == [7, 8, 9]
    scheduler.check_invariants()


def test_token_of_a_step_launched_after_the_end_is_dropped(make_scheduler, make_request) -> None:
    scheduler = make_scheduler()
    request = make_request()
    scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    (update,) = scheduler.update(first, [2])
    assert update.finish_reason is FinishReason.STOP
    again = make_request()
    scheduler.add(again)  # the same id, while a step of the first is still on the way
    third = scheduler.schedule()
    assert scheduler.update(second, [9]) == [None]
    assert request.output_token_ids == [2] and again.output_token_ids == []
    assert scheduler.update(third, [5])[0].request is again


def test_updates_come_in_order(make_scheduler, make_request) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request())
    scheduler.schedule()
    second = scheduler.schedule()
    with pytest.raises(AssertionError, match="step 1, but 0 comes first"):
        scheduler.update(second, [7])


@pytest.mark.parametrize(
    ("prompt_len", "num_tokens"),
    [(58, 6), (60, 4), (62, 2), (63, 1)],
)
def test_blocks_of_tokens_end_at_the_context_limit(make_scheduler, make_request, prompt_len, num_tokens) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    request = make_request(prompt_len=prompt_len, max_tokens=50)
    scheduler.add(request)
    while not request.is_finished:
        (update,) = scheduler.update_accepted(scheduler.schedule(), [[7] * 5])
    assert len(request.output_token_ids) == num_tokens and update.finish_reason is FinishReason.LENGTH


def test_block_of_tokens_is_cut_at_the_stop(make_scheduler, make_request) -> None:
    scheduler = make_scheduler()
    request = make_request(max_tokens=9)
    scheduler.add(request)
    run_step(scheduler)
    (update,) = scheduler.update_accepted(scheduler.schedule(), [[7, 8, 2, 9, 9]])
    assert update.new_token_ids == (7, 8, 2) and update.finish_reason is FinishReason.STOP
    scheduler.check_invariants()


def test_finish_reports_the_stop_string(make_scheduler, make_request) -> None:
    scheduler = make_scheduler()
    request = make_request()
    scheduler.add(request)
    run_step(scheduler)
    assert scheduler.finish("a", FinishReason.STOP, "END")
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "END")
    assert request.status is RequestStatus.FINISHED and request.row == 0 and request.pages == []


def test_preempted_request_comes_back_with_its_output(make_scheduler, make_request) -> None:
    scheduler = make_scheduler(num_pages=6)
    first, second = make_request("a", 7, max_tokens=12), make_request("b", 7, max_tokens=9, first=50)
    scheduler.add(first)
    scheduler.add(second)
    resumed = None
    for step in range(60):
        batch, _ = run_step(scheduler, token=100 + step)
        for init in batch.row_inits:
            if init.output_token_ids:
                resumed = (init, batch)
        if not scheduler.has_unfinished_requests():
            break
    assert first.num_preemptions == 0 and second.num_preemptions >= 1
    init, batch = resumed
    assert init.request_id == "b" and init.prompt_token_ids == tuple(range(50, 57))
    place = batch.request_ids.index("b")
    known = (*init.prompt_token_ids, *init.output_token_ids)
    assert batch.input_ids[-batch.query_lens[place] :] == known[batch.cached_lens[place] :]
    assert len(first.output_token_ids) == 12 and len(second.output_token_ids) == 9
    assert scheduler.stats().num_preemptions == second.num_preemptions


def test_preempted_request_waits_for_the_token_it_is_owed(make_scheduler, make_request) -> None:
    scheduler = make_scheduler(num_pages=5, page_size=4)
    first, second = make_request("a", 7, max_tokens=9), make_request("b", 7, max_tokens=6, first=50)
    scheduler.add(first)
    scheduler.add(second)
    pending = [scheduler.schedule(), scheduler.schedule()]
    assert second.status is RequestStatus.RUNNING
    pending.append(scheduler.schedule())
    assert second.status is RequestStatus.PREEMPTED and second.num_pending_tokens == 2
    for expected in (1, 2):
        batch = pending.pop(0)
        scheduler.update(batch, [7] * sum(batch.samples))
        assert len(second.output_token_ids) == expected and second.num_pending_tokens == 2 - expected
    while scheduler.has_unfinished_requests():
        if (batch := scheduler.schedule()) is not None:
            pending.append(batch)
        batch = pending.pop(0)
        scheduler.update(batch, [7] * sum(batch.samples))
        scheduler.check_invariants()
    assert len(first.output_token_ids) == 9 and len(second.output_token_ids) == 6


def test_preempted_request_takes_in_a_whole_block(make_scheduler, make_request) -> None:
    scheduler = make_scheduler(num_pages=5, page_size=4)
    second = make_request("b", 7, max_tokens=6, first=50)
    scheduler.add(make_request("a", 7, max_tokens=9))
    scheduler.add(second)
    run_step(scheduler)
    batch = scheduler.schedule()
    later = scheduler.schedule()
    assert second.status is RequestStatus.PREEMPTED and later.request_ids == ("a",)
    scheduler.update_accepted(batch, [[7], [7, 8, 9]])
    assert second.output_token_ids == [7, 7, 8, 9] and second.cached_len == 0
    scheduler.check_invariants()


def test_token_lost_by_a_preempted_request_is_computed_again(make_scheduler, make_request) -> None:
    scheduler = make_scheduler(num_pages=5, page_size=4)
    second = make_request("b", 7, max_tokens=6, first=50)
    scheduler.add(make_request("a", 7, max_tokens=9))
    scheduler.add(second)
    for _ in range(3):
        scheduler.schedule()
    assert second.status is RequestStatus.PREEMPTED
    assert scheduler.finish_running(FinishReason.ERROR) == ["a"]
    scheduler.check_invariants()
    while scheduler.has_unfinished_requests():
        run_step(scheduler)
    assert len(second.output_token_ids) == 6 and second.finish_reason is FinishReason.LENGTH


def test_blocked_request_starts_as_soon_as_pages_come_back(make_scheduler, make_request) -> None:
    scheduler = make_scheduler(num_pages=8)
    scheduler.add(make_request("long", 4, max_tokens=20))
    scheduler.add(make_request("short", 4, max_tokens=3))
    run_step(scheduler)
    scheduler.add(make_request("large", 14, first=50))
    seen = []
    while not seen or "large" not in seen[-1]:
        seen.append(run_step(scheduler)[0].request_ids)
    assert [("short" in ids, "long" in ids) for ids in seen] == [(True, True), (True, True), (False, True)]


def test_resumed_request_reports_no_prompt_logprobs_twice(make_scheduler, make_request) -> None:
    scheduler = make_scheduler(num_pages=6)
    scheduler.add(make_request("a", 7, max_tokens=12))
    second = make_request("b", 7, max_tokens=9, first=50, params={"prompt_logprobs": 0})
    scheduler.add(second)
    batches = []
    while scheduler.has_unfinished_requests():
        batches.append(run_step(scheduler)[0])
    resumed = [batch for batch in batches for init in batch.row_inits if init.output_token_ids]
    assert second.num_preemptions == len(resumed) >= 1
    assert [batch.needs_all_logits for batch in batches] == [True] + [False] * (len(batches) - 1)


def test_worse_priority_gives_way(make_scheduler, make_request) -> None:
    scheduler = make_scheduler(num_pages=6)
    humble, proud = make_request("a", 7, 12, priority=1), make_request("b", 7, 12, first=50)
    scheduler.add(humble)
    scheduler.add(proud)
    while scheduler.has_unfinished_requests():
        run_step(scheduler)
    assert humble.num_preemptions >= 1 and proud.num_preemptions == 0


def test_broken_step_ends_what_it_touched(make_scheduler, make_request) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b"))
    scheduler.schedule()
    assert scheduler.finish_running(FinishReason.ERROR) == ["a"]
    assert scheduler.stats().num_evictable_pages == 0, "nothing was computed for sure"
    scheduler.check_invariants()
    assert run_step(scheduler)[0].request_ids == ("b",)


def test_stats_add_up(make_scheduler, make_request) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_len=10, max_tokens=1))
    run_step(scheduler)
    stats = scheduler.stats()
    assert (stats.num_used_pages, stats.num_evictable_pages, stats.num_free_pages) == (0, 2, 30)
    scheduler.add(make_request("b", prompt_len=10))
    run_step(scheduler)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_prefix_hit_tokens) == (1, 0, 8)
    assert (stats.num_used_pages, stats.num_evictable_pages, stats.num_free_pages) == (3, 0, 29)


@pytest.mark.parametrize(("num_reqs", "num_waiting", "limit_us"), [(1, 0, 30), (256, 0, 150), (256, 1000, 200)])
def test_unchanged_decode_step_costs_the_host_little(
    make_scheduler, make_request, num_reqs, num_waiting, limit_us
) -> None:
    pool = {"num_pages": 8000, "page_size": 16, "max_model_len": 512, "max_pages_per_row": 32}
    scheduler = make_scheduler(**pool, max_num_seqs=num_reqs, max_num_batched_tokens=4096)
    for index in range(num_reqs + num_waiting):
        scheduler.add(make_request(str(index), 4 + index % 12, max_tokens=400))
    durations_us = []
    while len(durations_us) < 300:
        start = time.perf_counter()
        batch = scheduler.schedule()
        durations_us.append((time.perf_counter() - start) * 1e6)
        scheduler.update(batch, [7] * sum(batch.samples))
    # The best of the last steps: what the code costs, without what the machine adds.
    assert batch.num_reqs == num_reqs and min(durations_us[-200:]) < limit_us


def test_torch_is_never_imported() -> None:
    code = (
        "import sys, graphrunner.scheduler.scheduler, graphrunner.kvcache.radix_cache;"
        "sys.exit(any(name.split('.')[0] in ('torch', 'numpy') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
