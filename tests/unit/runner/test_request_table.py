"""The device half of running requests, and the one-copy loads behind it."""

import numpy as np
import pytest
import torch

from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.scheduled_batch import PageAppend, RowInit, SamplingNeed, ScheduledBatch
from graphrunner.core.shape_key import ForwardMode
from graphrunner.runner.gather_rows import gather_uniform, make_derived, slots_of
from graphrunner.runner.request_table import RequestTable
from graphrunner.runner.staging import StagingBlock, aligned

CPU = torch.device("cpu")


def batch(inits: tuple[RowInit, ...] = (), appends: tuple[PageAppend, ...] = (), cached: int = 0) -> ScheduledBatch:
    return ScheduledBatch(
        step_id=0, mode=ForwardMode.DECODE, request_ids=("a",), rows=(2,), cached_lens=(cached,), query_lens=(1,),
        input_ids=(), samples=(True,), sampling_need=SamplingNeed.GREEDY, row_inits=inits, page_appends=appends,
    )  # fmt: skip


def init(*pages: int) -> RowInit:
    return RowInit(2, "a", SamplingParams(), 0, (1, 2, 3), (), pages)


@pytest.fixture(params=["in place", "one packed copy"])
def table(request: pytest.FixtureRequest) -> RequestTable:
    table = RequestTable(num_rows=4, max_pages=5, device=CPU)
    table._is_remote = request.param == "one packed copy"
    return table


def test_a_new_owner_finds_no_stale_column(table: RequestTable) -> None:
    table.apply(batch((init(7, 8, 9, 6),), cached=13))
    assert table.page_table[2].tolist() == [7, 8, 9, 6, 0] and table.num_computed.tolist() == [0, 0, 13, 0]
    table.apply(batch((init(4),), cached=2))
    assert table.page_table[2].tolist() == [4, 0, 0, 0, 0] and table.num_computed.tolist() == [0, 0, 2, 0]
    assert not table.page_table[[0, 1, 3]].any()


def test_appends_and_inits_of_one_step(table: RequestTable) -> None:
    table.apply(batch((init(4),), (PageAppend(3, 1, (5, 6)), PageAppend(1, 4, (9,)))))
    assert table.page_table.tolist() == [[0] * 5, [0, 0, 0, 0, 9], [4, 0, 0, 0, 0], [0, 5, 6, 0, 0]]
    table.apply(batch((), (PageAppend(2, 1, (8,)),)))
    assert table.page_table[2].tolist() == [4, 8, 0, 0, 0]


def test_a_steady_step_is_no_work(table: RequestTable) -> None:
    table._write = table._send = None  # type: ignore[assignment]
    table.apply(batch())


def test_the_dummy_row_is_never_written(table: RequestTable) -> None:
    rows = torch.tensor([2, 0, 0], dtype=torch.int32)
    table.store_lengths(rows, torch.tensor([5, 6, 7], dtype=torch.int32))
    table.store_tokens(rows, torch.tensor([8, 9, 10], dtype=torch.int32))
    assert table.num_computed.tolist() == [0, 0, 5, 0] and table.last_token.tolist() == [0, 0, 8, 0]


def test_slots_past_the_last_column_are_in_the_dummy_page(table: RequestTable) -> None:
    table.apply(batch((init(4, 5, 6, 7, 8),)))
    rows = torch.tensor([2, 2, 2, 0], dtype=torch.int32)
    assert slots_of(table, rows, torch.tensor([0, 19, 20, 3]), page_size=4).tolist() == [16, 35, 0, 3]


def test_gather_of_a_verify_step(table: RequestTable) -> None:
    table.apply(batch((init(4, 5),), cached=3))
    table.last_token[2] = 42
    table.draft_tokens = torch.tensor([[-1, -1]] * 2 + [[1, 2]] + [[-1, -1]], dtype=torch.int32)
    out = make_derived(6, 2, CPU, 3)
    rows, counts = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    gather_uniform(table, rows, counts, 4, out)
    assert out.draft_tokens.tolist() == [[1, 2], [-1, -1]]
    assert out.input_ids.tolist() == [42, 1, 2, 0, 0, 0] and out.positions.tolist() == [3, 4, 5, 0, 1, 2]
    assert out.seq_lens.tolist() == [6, 3] and out.slot_mapping.tolist() == [19, 20, 21, 0, 1, 2]


def test_staging_never_hands_out_a_block_that_is_in_flight() -> None:
    staging = StagingBlock(aligned(20), CPU)
    log: list[str] = []

    class Fence:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self) -> None:
            log.append(f"wait {self.name}")

        def record(self) -> None:
            log.append(f"record {self.name}")

    hosts = [torch.zeros(32, dtype=torch.uint8) for _ in range(2)]
    staging._is_direct, staging._host_blocks = False, hosts
    staging.host_views, staging._fences = [host.numpy() for host in hosts], [Fence("a"), Fence("b")]
    for value in (1, 2, 3):
        staging.host_views[staging.begin()][:] = value
        staging.send(20)
        assert (staging.block[:20] == value).all() and (value > 1 or not staging.block[20:].any())
    assert log == ["wait b", "record b", "wait a", "record a", "wait b", "record b"]
    assert not np.shares_memory(hosts[0].numpy(), hosts[1].numpy())
