"""Verify steps: k + 1 tokens a request, drafts from the host or left in the buffer by a proposer."""

import pytest
import torch
from fakes.world import MAX_SEQ_LEN, Live, World, solo_tokens

from graphrunner.config.engine_config import GraphBackend
from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.scheduled_batch import PageAppend, SamplingNeed, ScheduledBatch
from graphrunner.core.shape_key import ForwardMode

WIDTH = 4
BACKENDS = [GraphBackend.RECORDING, GraphBackend.FULL, GraphBackend.BREAKABLE]


def verify_batch(world: World, lives: list[Live], drafts: list[list[int]], need: SamplingNeed) -> ScheduledBatch:
    appends = []
    for live in lives:
        start = len(live.pages)
        while len(live.pages) * 4 < min(live.cached_len + WIDTH, MAX_SEQ_LEN):
            live.pages.append(world._free_pages.pop())
        if live.pages[start:]:
            appends.append(PageAppend(live.row, start, tuple(live.pages[start:])))
    return ScheduledBatch(
        step_id=0,
        mode=ForwardMode.VERIFY,
        request_ids=tuple(live.name for live in lives),
        rows=tuple(live.row for live in lives),
        cached_lens=tuple(live.cached_len for live in lives),
        query_lens=(WIDTH,) * len(lives),
        input_ids=(),
        samples=(True,) * len(lives),
        sampling_need=need,
        page_appends=tuple(appends),
        num_draft_tokens=tuple(len(draft) for draft in drafts),
        draft_token_ids=tuple(drafts),
    )


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
@pytest.mark.parametrize("count", [1, 3, 4])
def test_right_drafts_stand_and_wrong_ones_fall(backend: GraphBackend, count: int, device: torch.device) -> None:
    world = World(device, backend=backend, decode_sizes=[1, 2, 4], query_width=WIDTH).capture()
    lives = [world.new(5 + index) for index in range(count)]
    world.step(chunks=[(live, len(live.tokens)) for live in lives])
    futures = [solo_tokens(live.tokens[:-1], 9, device)[1:] for live in lives]
    drafts = [future[: WIDTH - 1] for future in futures]
    drafts[0] = [drafts[0][0], (drafts[0][1] + 1) % 61]  # right, wrong, none
    output = world.run(verify_batch(world, lives, drafts, SamplingNeed.GREEDY), poison=3)
    assert world.last.miss is None and output.token_ids.shape == (count, WIDTH)
    kept = [futures[0][:2], *(future[:WIDTH] for future in futures[1:])]
    assert output.num_new.tolist() == [len(tokens) for tokens in kept]
    assert [row[: len(tokens)] for row, tokens in zip(output.token_ids.tolist(), kept)] == kept
    rows = torch.tensor([live.row for live in lives], device=device)
    moved = [live.cached_len + len(tokens) for live, tokens in zip(lives, kept, strict=True)]
    assert world.table.num_computed[rows].tolist() == moved
    assert world.table.last_token[rows].tolist() == [tokens[-1] for tokens in kept]


def test_plain_decoding_goes_on_where_a_verify_step_ended() -> None:
    world = World(decode_sizes=[2], query_width=WIDTH).capture()
    live = world.new(6)
    world.step(chunks=[(live, 6)])
    future = solo_tokens(live.tokens[:-1], 20)[1:]
    for draft in ([future[0], 0, 0], [future[2], future[3], future[4]], [], [1]):
        output = world.run(verify_batch(world, [live], [draft], SamplingNeed.GREEDY), poison=3)
        new = [token for token in output.token_ids[0].tolist() if token >= 0]
        live.tokens += new
        live.cached_len += len(new)
        assert live.tokens[7:] == future[: len(live.tokens) - 7]
    assert len(live.tokens) == 7 + 2 + 4 + 1 + 1


def test_logits_of_every_token() -> None:
    world = World(decode_sizes=[2], query_width=WIDTH).capture()
    lives = [world.new(6)]
    world.step(chunks=[(lives[0], 6)])
    output = world.run(verify_batch(world, lives, [[1, 2, 3]], SamplingNeed.LOGITS))
    assert output.logits.shape[0] == WIDTH and torch.isfinite(output.logits).all()


def test_refusals() -> None:
    world = World(decode_sizes=[2], query_width=WIDTH).capture()
    batch = ScheduledBatch(
        step_id=0, mode=ForwardMode.VERIFY, request_ids=("a", "b"), rows=(1, 2), cached_lens=(3, 3),
        query_lens=(WIDTH, 1), input_ids=(), samples=(True, True), sampling_need=SamplingNeed.GREEDY,
    )  # fmt: skip
    assert world.decode.graph_miss_reason(batch) == GraphMiss(GraphMissReason.QUERY_LEN, WIDTH, WIDTH)
    assert {key.num_tokens for key in world.decode.all_keys()} == {2 * WIDTH}
