"""Every runner on every backend: poison, edges, interleave, two tolerances, lifetime.

Free pages and the dummy page hold NaN throughout, so a read of memory that a row does not own shows as well.
"""

import pytest
import torch
from fakes.fake_model import VOCAB_SIZE
from fakes.world import MAX_SEQ_LEN, World, solo_tokens

from graphrunner.config.engine_config import GraphBackend
from graphrunner.core.scheduled_batch import SamplingNeed
from graphrunner.core.shape_key import ForwardVariant

BACKENDS = [GraphBackend.RECORDING, GraphBackend.FULL, GraphBackend.BREAKABLE]
GARBAGE = 7  # a valid row, id and slot: what is left over is read without a crash, and shows
backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)


# Compiled, for seconds: with `make test-all`, and on a GPU.
PIECEWISE = pytest.param(GraphBackend.PIECEWISE, marks=pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def kept_artifacts(tmp_path_factory: pytest.TempPathFactory):
    """One folder for what these tests compile, of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHRUNNER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=[*BACKENDS, PIECEWISE, "cpu runner"], ids=str)
def world(request: pytest.FixtureRequest, device: torch.device) -> World:
    if request.param == "cpu runner":
        if device.type != "cpu":
            pytest.skip("the CPU runner writes host memory")
        return World(is_cpu_runner=True).capture()
    return World(device, backend=request.param).capture()


def decode_runner(world: World) -> str:
    return "cpu_graph_runner" if world.decode is world.prefill else "decode_cuda_graph_runner"


def is_graph(world: World) -> bool:
    assert world.last is not None
    return world.last.miss is None


def started(world: World, lengths: list[int]) -> list:
    lives = [world.new(length) for length in lengths]
    world.step(chunks=[(live, len(live.tokens)) for live in lives])
    return lives


def check_solo(world: World, lives: list, lengths: list[int]) -> None:
    for live, length in zip(lives, lengths, strict=True):
        prompt, new = live.tokens[:length], live.tokens[length:]
        assert new == solo_tokens(prompt, len(new), world.device), live.name


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8])
def test_decode_at_every_edge(world: World, count: int) -> None:
    lengths = [3 + 2 * index for index in range(count)]
    lives = started(world, lengths)
    for step in range(5):
        world.step(decode=lives, poison=GARBAGE if step % 2 else None)
        assert is_graph(world) and world.last.runner.name == decode_runner(world)
    check_solo(world, lives, lengths)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 60])
def test_prefill_at_every_edge(world: World, num_tokens: int) -> None:
    live = world.new(num_tokens)
    world.step(chunks=[(live, num_tokens)], poison=GARBAGE)
    # A bucket that more than doubles the work, or none at all, leaves the step to the eager runner.
    assert is_graph(world) == (4 <= num_tokens <= 32)
    world.step(decode=[live])
    check_solo(world, [live], [num_tokens])


def test_several_prompts_and_chunks_in_one_step(world: World) -> None:
    lengths = [5, 11, 3]
    lives = [world.new(length) for length in lengths]
    world.step(chunks=[(lives[0], 5), (lives[1], 4), (lives[2], 3)], poison=GARBAGE)
    assert is_graph(world) and len(lives[1].tokens) == 11
    for _ in range(2):
        world.step(decode=[lives[0], lives[2]], chunks=[(lives[1], len(lives[1].tokens) - lives[1].cached_len - 1)]
                   if lives[1].cached_len < 10 else [(lives[1], 1)], poison=GARBAGE)  # fmt: skip
    for _ in range(3):
        world.step(decode=lives)
    check_solo(world, lives, lengths)


def test_mixed_step_uses_the_tokens_that_only_the_device_knows(world: World) -> None:
    (first,) = started(world, [6])
    world.step(decode=[first])
    second = world.new(10)
    world.step(decode=[first], chunks=[(second, 10)], poison=GARBAGE)
    assert is_graph(world) and world.last.runner is world.prefill
    for _ in range(3):
        world.step(decode=[second, first])
    check_solo(world, [first, second], [6, 10])


def test_interleaved_keys_and_eager_steps(world: World) -> None:
    lengths = [4, 9, 13]
    lives = started(world, lengths)
    for count in (3, 1, 3, 2, 1, 3):
        world.step(decode=lives[:count])
        if count == 2:
            long = world.new(50)
            world.step(chunks=[(long, 50)])
            assert not is_graph(world)
            world.free(long)
    for _ in range(2):
        world.step(decode=list(reversed(lives)))
    check_solo(world, lives, lengths)


def test_rows_and_pages_change_owners(world: World) -> None:
    for seed in range(4):
        lengths = [4 + seed, 17, 8 - seed]
        lives = started(world, lengths)
        for _ in range(4):
            world.step(decode=lives)
        check_solo(world, lives, lengths)
        for live in lives:
            world.free(live)


def test_context_limit(world: World) -> None:
    lengths = [MAX_SEQ_LEN - 4, MAX_SEQ_LEN - 1]
    lives = started(world, lengths)
    world.step(decode=lives)
    for _ in range(3):
        world.step(decode=lives[:1])
    assert is_graph(world) and lives[0].cached_len == MAX_SEQ_LEN
    check_solo(world, lives, lengths)


@backends
@pytest.mark.parametrize("need", list(SamplingNeed), ids=lambda n: n.value)
def test_replay_equals_the_closure_uncaptured(backend: GraphBackend, need: SamplingNeed, device: torch.device) -> None:
    """Bit-equal: the same closure at the same padded shape. (Eager at the real shape is merely close, see above.)"""
    outputs = []
    for kind in (backend, GraphBackend.RECORDING):
        world = World(device, backend=kind, prefill_sizes=None).capture()
        lives = started(world, [5, 9, 2])
        outputs.append(world.run(world.batch(decode=lives, need=need)))
        assert is_graph(world)
    wants_tokens = need is not SamplingNeed.LOGITS
    replayed, called = ((o.token_ids if wants_tokens else o.logits) for o in outputs)
    assert replayed.shape == called.shape == ((3,) if wants_tokens else (3, VOCAB_SIZE))
    assert torch.equal(replayed, called)


@pytest.mark.parametrize("backend", [*BACKENDS, PIECEWISE], ids=lambda b: b.value)
def test_logits_are_close_to_eager_at_the_real_shape(backend: GraphBackend, device: torch.device) -> None:
    logits = []
    for sizes in ((4,), None):
        world = World(device, backend=backend, decode_sizes=sizes, prefill_sizes=None).capture()
        lives = started(world, [5, 9, 2])
        logits.append(world.run(world.batch(decode=lives, need=SamplingNeed.LOGITS)).logits)
    assert torch.isfinite(logits[0]).all()
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_outputs_expire_at_the_next_execute(world: World) -> None:
    lives = started(world, [5, 9])
    for live in lives:
        live.cached_len += 0
    first = world.run(world.batch(decode=lives, need=SamplingNeed.LOGITS)).logits
    kept = first.clone()
    assert torch.isfinite(first).all()
    for live in lives:
        live.cached_len += 1
        live.tokens.append(0)
    world.run(world.batch(decode=lives, need=SamplingNeed.GREEDY))
    # Poison on the CPU; on a device the next replay may have taken the memory over already.
    assert not torch.equal(first, kept) and torch.isfinite(kept).all()


def test_an_unchanged_step_loads_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(device).capture()
    lives = started(world, [6, 6, 6])
    world.step(decode=lives)
    loads = []
    buffers = world.decode.buffers
    monkeypatch.setattr(type(buffers), "load", lambda *args, **named: loads.append(args))
    world.step(decode=lives)
    assert not loads
    monkeypatch.undo()
    world.step(decode=lives[:2])
    world.step(decode=lives)
    check_solo(world, lives, [6, 6, 6])


def test_capture_leaves_nothing_behind(world: World) -> None:
    assert not world.table.page_table.any()
    assert not world.table.num_computed.any() and not world.table.last_token.any()
    report = world.account.report()
    assert all(entry.num_replays == 0 for entry in report.keys) and not report.misses
    # Only the dummy page was written.
    assert world.kv.k[1:].isnan().all() and world.kv.v[1:].isnan().all()


def test_the_dummy_row_stays_zero(world: World) -> None:
    lives = started(world, [5, 6, 7])
    for _ in range(3):
        world.step(decode=lives)
    assert not world.table.page_table[0].any()
    assert world.table.num_computed[0] == 0 and world.table.last_token[0] == 0


def test_close_then_capture_again(world: World) -> None:
    lives = started(world, [5, 6])
    world.step(decode=lives)
    world.decode.close()
    world.decode.close()
    world.step(decode=lives)
    assert not is_graph(world)
    world.decode.capture()
    world.step(decode=lives)
    assert is_graph(world)
    check_solo(world, lives, [5, 6])


def test_keys_say_both_counts(device: torch.device) -> None:
    world = World(device).capture()
    lives = started(world, [5, 6, 7])
    world.step(decode=lives)
    entry = max(world.account.report().keys, key=lambda entry: entry.num_replays)
    assert entry.num_replays == 1
    by_runner = {e.runner: e for e in world.account.report().keys if e.num_replays}
    decode = by_runner["decode_cuda_graph_runner"]
    assert (decode.key.num_tokens, decode.key.num_reqs, decode.key.variant) == (4, 4, ForwardVariant.GREEDY)
    assert decode.padding_share == 0.25
    prefill = by_runner["prefill_cuda_graph_runner"]
    assert (prefill.key.num_tokens, prefill.key.num_reqs) == (32, 9)
