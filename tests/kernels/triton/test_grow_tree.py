"""A tree that grows by kernels against the same tree in torch: drafts, shapes, and every step of the draft between."""

from __future__ import annotations

import pytest
import torch
from fakes.world import PAGE_SIZE

from graphrunner.attention.torch_attention import TorchAttention
from graphrunner.core.draft_tree import TreeGrowth
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.shape_key import ForwardVariant, ShapeKey
from graphrunner.execution.recording import RecordingBackend
from graphrunner.runner import eagle_grown_tree_draft_cuda_graph_runner as grown
from graphrunner.runner.base_draft_runner import DraftCapture
from graphrunner.runner.eagle_state import EagleState
from graphrunner.runner.graph_account import GraphAccount
from graphrunner.runner.request_table import RequestTable
from graphrunner.runner.runner_context import RunnerContext

MAX_REQS, HIDDEN, MAX_TOKEN = 5, 40, 900
SEEN = ("input_ids", "positions", "slot_mapping", "seq_lens", "tree_mask")


class World:
    """A draft that guesses at random, but the same for the same hidden row; what each of its steps was given."""

    def __init__(self, tree: TreeGrowth, device: torch.device) -> None:
        self.device = device
        self.steps: list[list[torch.Tensor]] = []
        self.table = RequestTable(MAX_REQS + 2, 8, device, tree.num_nodes)
        self.table.num_computed[1:] = torch.arange(MAX_REQS + 1, device=device) * 5 + 2
        self.table.page_table[1:] = torch.arange(1, 8 * MAX_REQS + 9, device=device).view(-1, 8).int()
        self.table.draft_tokens.fill_(8)
        state = EagleState(MAX_REQS, HIDDEN, torch.float32, device)
        rng = torch.Generator().manual_seed(4)
        self._root = torch.randn(MAX_REQS, HIDDEN, generator=rng)
        self._head = torch.randn(HIDDEN, 300, generator=rng).to(device)
        context = RunnerContext(
            lambda batch, variant: None, lambda hidden: None, self.table, (), TorchAttention(), device, PAGE_SIZE, 64
        )  # fmt: skip
        capture = DraftCapture(context, RecordingBackend(), GraphAccount(), (1, 4), MAX_TOKEN)
        self.runner = grown.EagleGrownTreeDraftCudaGraphRunner(
            capture, layer=self._layer, branch=self._branch, state=state, tree=tree
        )

    def _layer(self, step: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        given = [getattr(step, name) for name in SEEN if getattr(step, name) is not None]
        self.steps.append([each.cpu().clone() for each in (*given, hidden)])
        left = hidden.roll(1, 1) + step.input_ids.unsqueeze(1) * 0.01
        hidden.fill_(float("nan"))  # a step may overwrite what it is given
        return left

    def _branch(self, hidden, request_rows, positions, count: int, variant: ForwardVariant):
        if variant is not ForwardVariant.GREEDY:
            self.steps.append([request_rows.cpu().long(), positions.cpu().long()])
        best = (hidden @ self._head * 0.3).log_softmax(1).topk(count)
        return (best.indices * 7 - 50).int(), best.values

    def drafts(self, num_reqs: int, variant: ForwardVariant) -> list[torch.Tensor]:
        views = self.runner.capture_prepare(ShapeKey(num_reqs, num_reqs, variant))
        self.runner.state.hidden.copy_(self._root)
        views.request_rows.copy_(torch.tensor([4, 0, 6, 1][:num_reqs]))
        with torch.inference_mode():
            output = self.runner.forward_over(views, variant)
        assert output.token_ids is not None
        return [each.cpu() for each in (output.token_ids, self.table.draft_tokens, self.table.draft_parents[1:])]


@pytest.mark.parametrize(
    ("nodes", "levels", "children", "variant"),
    [
        (7, 5, 2, ForwardVariant.GREEDY), (7, 2, 7, ForwardVariant.GREEDY), (7, 3, 3, ForwardVariant.SAMPLE),
        (4, 1, 6, ForwardVariant.SAMPLE),
    ],
)  # fmt: skip
def test_grown_like_the_twin(device, monkeypatch, nodes: int, levels: int, children: int, variant) -> None:
    told = []
    for has_kernels in (False, True):
        world = World(TreeGrowth(nodes, levels, children), device)
        monkeypatch.setattr(grown, "has_gpu_kernels", lambda x, answer=has_kernels: answer)
        told.append((world.drafts(4, variant), world.steps))
    (wanted, wanted_steps), (drafts, steps) = told
    for one, twin in zip(drafts, wanted, strict=True):
        assert one.equal(twin)
    assert len(steps) == len(wanted_steps)
    for one, twin in zip(steps, wanted_steps, strict=True):
        for given, expected in zip(one, twin, strict=True):
            assert given.reshape(-1).to(expected.dtype).equal(expected.reshape(-1))
    assert drafts[1][0].tolist() == [-1] * nodes and drafts[1][2].tolist() == [8] * nodes
    assert len({*drafts[0].tolist()}) > 1
