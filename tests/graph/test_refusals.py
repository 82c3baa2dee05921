"""Each miss reason has a batch that triggers it, with the numbers behind it."""

import logging

import pytest
import torch
from fakes.world import MAX_SEQ_LEN, PAGE_SIZE, Live, World

from graphrunner.attention.backend import GraphSupport
from graphrunner.attention.torch_attention import TorchAttention
from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.scheduled_batch import SamplingNeed, ScheduledBatch
from graphrunner.core.shape_key import ForwardMode
from graphrunner.runner.select_runner import select_runner


def started(world: World, count: int, length: int = 5) -> list[Live]:
    lives = [world.new(length) for _ in range(count)]
    for live in lives:
        world.step(chunks=[(live, length)])
    return lives


def miss_of(world: World, batch: ScheduledBatch) -> GraphMiss | None:
    return select_runner((world.decode, world.prefill), batch, world.eager).miss


def test_num_reqs() -> None:
    world = World(decode_sizes=[1, 2, 4]).capture()
    assert miss_of(world, world.batch(decode=started(world, 6))) == GraphMiss(GraphMissReason.NUM_REQS, 6, 4)
    world = World(max_reqs=9).capture()
    world.prefill._max_reqs = 2
    batch = world.batch(chunks=[(world.new(4), 4) for _ in range(3)])
    assert miss_of(world, batch) == GraphMiss(GraphMissReason.NUM_REQS, 3, 2)


def test_num_tokens_and_padding() -> None:
    world = World(prefill_sizes=[8, 32]).capture()
    assert miss_of(world, world.batch(chunks=[(world.new(33), 33)])) == GraphMiss(GraphMissReason.NUM_TOKENS, 33, 32)
    assert miss_of(world, world.batch(chunks=[(world.new(15), 15)])) == GraphMiss(GraphMissReason.PADDING, 32, 30)
    assert miss_of(world, world.batch(chunks=[(world.new(16), 16)])) is None


def test_mode_is_the_other_runners_business() -> None:
    world = World().capture()
    (live,) = started(world, 1)
    decode, prefill = world.batch(decode=[live]), world.batch(chunks=[(world.new(8), 8)])
    assert (
        world.decode.graph_miss_reason(prefill)
        == world.prefill.graph_miss_reason(decode)
        == GraphMiss(GraphMissReason.MODE)
    )
    assert miss_of(world, decode) is None and miss_of(world, prefill) is None


@pytest.mark.parametrize("is_decode_off", [True, False])
def test_a_phase_without_graphs_does_not_hide_the_other_ones_reason(is_decode_off: bool) -> None:
    world = World(decode_sizes=None if is_decode_off else [1], prefill_sizes=[8] if is_decode_off else None).capture()
    lives = started(world, 2)
    decode, prefill = world.batch(decode=lives), world.batch(chunks=[(world.new(30), 30)])
    off = GraphMiss(GraphMissReason.OFF)
    assert miss_of(world, decode) == (off if is_decode_off else GraphMiss(GraphMissReason.NUM_REQS, 2, 1))
    assert miss_of(world, prefill) == (GraphMiss(GraphMissReason.NUM_TOKENS, 30, 8) if is_decode_off else off)


def test_all_logits() -> None:
    world = World().capture()
    batch = world.batch(chunks=[(world.new(8), 8)], needs_all_logits=True)
    assert miss_of(world, batch) == GraphMiss(GraphMissReason.ALL_LOGITS)
    output = world.run(batch)
    assert (output.logits.shape[0], output.hidden_states.shape[0]) == (1, 8)


def test_pooling_is_no_refusal() -> None:
    """A recording of a prompt holds the hidden states that an embedding needs, cut to the real tokens."""
    outputs = []
    for is_captured in (True, False):
        world = World()
        batch = (world.capture() if is_captured else world).batch(
            chunks=[(world.new(7), 7), (world.new(5), 5)], needs_hidden_states=True
        )
        assert (miss_of(world, batch) is None) == is_captured
        outputs.append(world.run(batch))
    assert outputs[0].hidden_states.shape[0] == 12
    torch.testing.assert_close(outputs[0].hidden_states, outputs[1].hidden_states)


def test_query_len_and_seq_len() -> None:
    world = World().capture()
    common = {"step_id": 0, "mode": ForwardMode.DECODE, "request_ids": ("a",), "input_ids": (), "samples": (True,)}
    greedy = {"sampling_need": SamplingNeed.GREEDY, "rows": (1,)}
    wide = ScheduledBatch(**common, **greedy, cached_lens=(4,), query_lens=(3,))
    assert miss_of(world, wide) == GraphMiss(GraphMissReason.QUERY_LEN, 3, 1)
    long = ScheduledBatch(**common, **greedy, cached_lens=(MAX_SEQ_LEN,), query_lens=(1,))
    assert miss_of(world, long) == GraphMiss(GraphMissReason.SEQ_LEN, MAX_SEQ_LEN + 1, MAX_SEQ_LEN)


def test_attention_that_cannot_be_recorded() -> None:
    class HostAttention(TorchAttention):
        graph_support = GraphSupport.NEVER

    world = World(attention=HostAttention()).capture()
    assert not world.account.report().keys
    lives = started(world, 1)
    assert miss_of(world, world.batch(decode=lives)) == GraphMiss(GraphMissReason.ATTENTION)


def test_not_captured_and_lazy_capture() -> None:
    world = World(is_lazy=True).capture()
    assert not world.account.report().keys
    lives = started(world, 3, length=2 * PAGE_SIZE)
    world.step(decode=lives)
    assert world.last.miss == GraphMiss(GraphMissReason.NOT_CAPTURED)
    world.step(decode=lives)
    assert world.last.miss is None
    assert [str(e.key) for e in world.account.report().keys if e.runner.startswith("decode")] == ["4t x 4r greedy"]


def test_one_warning_names_both_limits(caplog: pytest.LogCaptureFixture) -> None:
    world = World(decode_sizes=[1, 2, 4], max_reqs=9).capture()
    lives = started(world, 6)
    with caplog.at_level(logging.WARNING, logger="graphrunner"):
        for _ in range(4):
            world.step(decode=lives)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "6 > 4" in said[0] and "max_num_seqs 9" in said[0] and "captured size 4" in said[0]
    assert world.account.report().misses["NUM_REQS"] == 4
    world.step(decode=lives[:4])
    assert world.last.miss is None


def test_every_reason_reads_well() -> None:
    for reason in GraphMissReason:
        assert str(GraphMiss(reason)) == f"{reason.name}: {reason.value}"
