"""What a round leaves for the draft after it: each kernel against torch's copies."""

import pytest
import torch

from graphrunner.kernels.triton import round_rows
from graphrunner.runner.round_inputs import newest_read


@pytest.mark.parametrize(("num_reqs", "width", "columns"), [(3, 8, 1728), (5, 1, 40), (1, 2, 3000)])
@pytest.mark.parametrize("has_counts", [False, True])
def test_rounds_are_copied(device, num_reqs: int, width: int, columns: int, has_counts: bool) -> None:
    total = num_reqs * width
    hidden = torch.randn(total, columns, device=device).bfloat16()
    tokens = torch.randint(0, 99, (total,), dtype=torch.int32, device=device)
    counts = torch.randint(1, width + 1, (num_reqs,), dtype=torch.int32, device=device)
    kept = [torch.full_like(torch.cat((each, each)), 77) for each in (hidden, tokens, counts)]
    given = (counts, kept[2]) if has_counts else ()
    round_rows.copy_round(hidden, tokens, kept[0], kept[1], *given)
    for out, wanted in zip(kept, (hidden, tokens, counts), strict=True):
        is_written = has_counts or wanted is not counts
        assert out[: len(wanted)].equal(wanted if is_written else torch.full_like(wanted, 77))
        assert bool((out[len(wanted) :] == 77).all()), "past the round"


@pytest.mark.parametrize("width", [1, 5])
def test_newest_tokens_match_twin(device, width: int) -> None:
    num_reqs = 131
    ids = torch.randint(0, 99, (num_reqs * width,), dtype=torch.int32, device=device)
    counts = torch.randint(1, width + 1, (num_reqs,), dtype=torch.int32, device=device)
    kept_ids, kept_counts = (torch.full((140,), -7, dtype=torch.int32, device=device) for _ in range(2))
    round_rows.keep_newest(ids, counts, kept_ids, kept_counts)
    assert kept_ids[:num_reqs].equal(newest_read(ids, counts, width)) and kept_counts[:num_reqs].equal(counts)
    assert kept_ids[num_reqs:].tolist() == kept_counts[num_reqs:].tolist() == [-7] * 9
