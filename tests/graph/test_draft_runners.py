"""Every draft runner on every backend: poison, edges, interleave, refusals, lifetime.

A row's drafts are what the same round yields for the row alone, called and not recorded.
"""

from __future__ import annotations

from pathlib import Path

import draft_making
import pytest
import torch
from draft_world import MAX_REQS, WIDTH, DraftWorld, prompt_batch

from graphrunner.config.engine_config import GraphBackend
from graphrunner.config.hf_model_config import model_config_from_hf
from graphrunner.core.graph_miss import GraphMissReason
from graphrunner.core.scheduled_batch import SamplingNeed
from graphrunner.models.causal_lm import CausalLM
from graphrunner.models.options import ModelOptions
from graphrunner.models.registry import build_model
from graphrunner.weights.dummy import iterate_dummy

METHODS = {
    "eagle3": ("eagle", draft_making.eagle3),
    "eagle1": ("eagle", lambda folder: draft_making.eagle1(folder, is_right=False)),
    "mtp": ("mtp", lambda folder: draft_making.mtp(folder, num_heads=3, is_right=False)),
    "tree": ("eagle", draft_making.eagle3),
    "grown": ("eagle", draft_making.eagle3),
    "frozen": ("frozen_kv_mtp", lambda folder: draft_making.frozen_kv(folder, is_right=False)),
}
RECORDED = [
    *((kind, GraphBackend.RECORDING) for kind in METHODS),
    ("eagle3", GraphBackend.FULL),
    ("mtp", GraphBackend.FULL),
    ("tree", GraphBackend.FULL),
    ("grown", GraphBackend.FULL),
    ("frozen", GraphBackend.FULL),
    ("eagle1", GraphBackend.BREAKABLE),
    ("tree", GraphBackend.BREAKABLE),
]
GARBAGE = 7  # a valid row and slot: what is left over is read without a crash, and shows
TREE = "[(0,), (1,), (0, 0)]"
RANDOM = {"need": SamplingNeed.RANDOM}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    return {name: make(root / name) for name, (_, make) in METHODS.items()}


@pytest.fixture
def model(device: torch.device) -> CausalLM:
    config = model_config_from_hf(draft_making.CONFIG | {"architectures": ["LlamaForCausalLM"]})
    model = build_model(config, ModelOptions(device=device, num_positions=80))
    model.load_weights(iterate_dummy(config, torch.float32, device, seed=2))
    return model


@pytest.fixture(params=METHODS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(kind: str, model: CausalLM, folders: dict[str, Path]):
    def make(backend: GraphBackend | None = GraphBackend.RECORDING, **options) -> DraftWorld:
        options |= {"tree": TREE} if kind == "tree" else {"topk": 2} if kind == "grown" else {}
        return DraftWorld(METHODS[kind][0], model, folders[kind], backend=backend, **options).capture()

    return make


@pytest.fixture
def alone(make):
    """Drafts of each row by itself, called eagerly in a world of its own."""

    def run(rows: list[int], **options) -> list[list[int]]:
        return [make(None).propose([row], **options)[0] for row in rows]

    return run


@pytest.mark.parametrize(("kind", "backend"), RECORDED, ids=lambda one: getattr(one, "value", one))
def test_every_size_poisoned(make, alone, backend: GraphBackend) -> None:
    rows = list(range(1, MAX_REQS + 1))
    expected = {0: alone(rows), 1: alone(rows, **RANDOM)}
    assert all(0 <= token < draft_making.VOCAB for drafts in expected[0] for token in drafts)
    world = make(backend)
    for count in (1, 3, MAX_REQS):  # the last one past every recorded size
        chosen = rows[-count:]
        assert world.propose(chosen, poison=GARBAGE) == expected[0][-count:]
        assert world.propose(chosen, **RANDOM) == expected[1][-count:]
    reasons = world.account.report().misses
    assert set(reasons) == {GraphMissReason.NUM_REQS.name}


@pytest.mark.parametrize(("kind", "backend"), RECORDED, ids=lambda one: getattr(one, "value", one))
def test_interleaved_widths_and_batches(make, alone, backend: GraphBackend) -> None:
    wide, narrow = alone([2, 5, 6]), alone([4], width=1)
    world = make(backend)
    for _ in range(2):
        assert world.propose([2, 5, 6]) == wide
        assert world.propose([4], width=1, poison=GARBAGE) == narrow
        assert world.propose([6, 2]) == [wide[2], wide[0]]


def test_only_owned_pages_are_written(make, kind: str) -> None:
    world = make()
    before = world.snapshot()
    rows = [2, 3]
    world.propose(rows)
    owned = set(world.table.page_table[rows].flatten().tolist())
    for old, new in zip(before, world.snapshot(), strict=True):
        changed = {
            page for page in range(len(old)) if not torch.equal(old[page].nan_to_num(9), new[page].nan_to_num(9))
        }
        assert changed <= owned and (changed or kind == "frozen")
    assert world.table.num_computed[0] == 0 and world.table.last_token[0] == 0
    assert not world.table.page_table[0].any()
    assert set(world.table.draft_tokens[[1, 4, 5]].flatten().tolist()) == {-7}, "rows that are not in the batch"


def test_refusals(make) -> None:
    world = make()
    good = world.round_of([1, 2])
    for runner in world.runners():
        decode = runner.graph_miss_reason(world.round_of([1], width=1).batch)
        verify = runner.graph_miss_reason(good.batch)
        assert None in (decode, verify), "each takes one kind or both"
        assert runner.graph_miss_reason(prompt_batch(good)).reason is GraphMissReason.MODE
        if runner.widths != (1,):  # else it follows the newest token of each row, whatever the step's width
            between = runner.graph_miss_reason(world.round_of([1, 2], width=WIDTH - 1).batch)
            assert between.reason is GraphMissReason.QUERY_LEN
        many = world.round_of(list(range(1, MAX_REQS + 1)), width=WIDTH if verify is None else 1)
        assert runner.graph_miss_reason(many.batch).reason is GraphMissReason.NUM_REQS
        runner.close()
        fitting = good.batch if verify is None else world.round_of([1], width=1).batch
        assert runner.graph_miss_reason(fitting).reason is GraphMissReason.NOT_CAPTURED


def test_lazy_capture_and_no_capture(make, alone) -> None:
    expected = alone([3, 4])
    lazy = make(is_lazy=True)
    assert [lazy.propose([3, 4]) for _ in range(3)] == [expected] * 3
    report = lazy.account.report()
    assert report.misses == {GraphMissReason.NOT_CAPTURED.name: report.num_eager_steps}
    assert all(entry.num_replays for entry in report.keys) and report.keys
    off = make(None)
    assert not off.proposer.runners() and off.propose([3, 4]) == expected


def test_close_and_capture_again(make, alone) -> None:
    expected = alone([5])
    world = make()
    for runner in world.runners():
        runner.close()
        runner.close()
    assert world.propose([5]) == expected
    world.capture()
    assert world.propose([5]) == expected


def test_heads_recorded_apart_draft_the_same(model: CausalLM, folders: dict[str, Path]) -> None:
    """One recording a head: what goes from head to head lies in the shared inputs."""
    from graphrunner.runner.base_draft_runner import DraftCapture
    from graphrunner.runner.multi_layer_eagle_draft_extend_cuda_graph_runner import (
        MultiLayerEagleDraftExtendCudaGraphRunner,
    )

    together = DraftWorld("mtp", model, folders["mtp"]).capture()
    expected = together.propose([1, 4, 6])
    world = DraftWorld("mtp", model, folders["mtp"])
    (whole,) = world.runners()
    heads = [
        MultiLayerEagleDraftExtendCudaGraphRunner(
            DraftCapture(whole.context, type(whole.backend)(), whole.account, whole.sizes, 95), head=whole._head,
            inputs=whole.inputs, heads=(index,), drafts=whole.drafts, widths=whole.widths, name=f"head_{index}",
        )
        for index in range(3)
    ]  # fmt: skip
    round_ = world.round_of([1, 4, 6])
    for runner in heads:
        runner.capture()
    with torch.inference_mode():
        whole.inputs.take(round_.token_ids, round_.num_new, round_.hidden_states)
        for runner in heads:
            runner.execute(runner.load_batch(round_.batch))
    assert world.table.draft_tokens[[1, 4, 6]].tolist() == expected
