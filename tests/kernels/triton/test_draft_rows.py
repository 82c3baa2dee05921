"""Placing draft steps and storing drafts: each kernel against its twin."""

import pytest
import torch
from draft_views import views_of

from graphrunner.kernels.triton import draft_rows
from graphrunner.kernels.triton.request_rows import DecodeInputs
from graphrunner.runner import draft_rows as twins
from graphrunner.runner.request_table import RequestTable

PAGE_SIZE, MAX_PAGES = 4, 6


def _table(device: torch.device) -> RequestTable:
    table = RequestTable(7, MAX_PAGES, device, 5)
    table.num_computed[1:] = torch.tensor([1, 2, 9, 20, 23, 24], device=device)
    table.page_table[1:] = torch.randperm(6 * MAX_PAGES, device=device).view(6, MAX_PAGES) + 1
    return table


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("is_round", [False, True])
def test_placed_like_the_twin(device, width: int, is_round: bool) -> None:
    if width > 1 and not is_round:
        width = 1
    table, rows = _table(device), torch.tensor([3, 0, 5, 1, 6, 0], dtype=torch.int32, device=device)
    tokens = torch.randint(-5, 120, (len(rows) * width,), dtype=torch.int32, device=device)
    num_new = torch.tensor([width, 77, 1, -3, 2, 1], dtype=torch.int32, device=device)
    kernel, twin = views_of(table, rows, width), views_of(table, rows, width)
    out = DecodeInputs(kernel.input_ids, kernel.positions, kernel.seq_lens, kernel.slot_mapping)
    if is_round:
        draft_rows.place_tokens(
            rows, table.num_computed, table.page_table, tokens=tokens, page_size=PAGE_SIZE, max_token_id=99, out=out,
            num_new=num_new, last=kernel.logits_indices,
        )  # fmt: skip
        twins.place_round(table, twin, tokens, num_new, PAGE_SIZE, 99)
    else:
        draft_rows.place_tokens(
            rows, table.num_computed, table.page_table, tokens=tokens, page_size=PAGE_SIZE, max_token_id=99, out=out,
            shift=-1,
        )  # fmt: skip
        twins.place_step(table, twin, tokens, -1, PAGE_SIZE, 99)
    for name in ("input_ids", "positions", "seq_lens", "slot_mapping", "logits_indices"):
        assert getattr(kernel, name).tolist() == getattr(twin, name).tolist(), name


def test_stored_like_the_twin(device) -> None:
    rows = torch.tensor([2, 0, 6, 0], dtype=torch.int32, device=device)
    drafts = torch.randint(0, 50, (4, 3), dtype=torch.int32, device=device)
    kernel, twin = _table(device), _table(device)
    for table in (kernel, twin):
        table.draft_tokens.fill_(8)
    draft_rows.store_drafts(rows, drafts, kernel.draft_tokens)
    twins.store_drafts(twin, rows, drafts)
    assert kernel.draft_tokens.tolist() == twin.draft_tokens.tolist()
    assert kernel.draft_tokens[0].tolist() == [-1] * 5 and kernel.draft_tokens[1].tolist() == [8] * 5
