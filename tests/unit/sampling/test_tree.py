"""Trees of drafts: shape, longest right path, and the KV that stays."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from draft_views import views_of

from graphrunner.core.draft_tree import DraftTree, tree_from_paths
from graphrunner.core.forward_batch import KVLayer
from graphrunner.kernels.reference import paged_attention, tree_visible
from graphrunner.runner.request_table import RequestTable
from graphrunner.runner.tree_step import TreeStep
from graphrunner.sampling.tree import PathPicker

CPU = torch.device("cpu")
TREES = ["[(0,)]", "[(0,), (1,), (2,)]", "[(0,), (0, 0), (0, 0, 0)]", "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]"]


def test_paths_are_read_in_any_order() -> None:
    tree = tree_from_paths("[(0, 0), (1,), (0,), (1, 0)]")
    assert tree == DraftTree((0, 0, 1, 2)) == tree_from_paths([(0,), (1,), (0, 0), (1, 0)])
    assert tree.depths == (0, 1, 1, 2, 2) and tree.num_levels == 2 and tree.num_tokens == 5
    assert tree.children(0) == [1, 2] and tree.children(2) == [4] and tree.level(2) == range(3, 5)
    assert tree.sees()[4] == [True, False, True, False, True]


@pytest.mark.parametrize("paths", ["", "x", "[(0,)", "[]", "{}", "print(1)"])
def test_what_is_no_list_of_paths_is_called_that(paths: str) -> None:
    with pytest.raises(ValueError, match=r"^must be a list of paths, as \[\(0,\), "):
        tree_from_paths(paths)


def _walk(tree: DraftTree, drafts: list[int], target: list[int]) -> tuple[list[int], list[int]]:
    """Tokens and path of one request, node by node."""
    path, tokens = [0], [target[0]]
    while True:
        nodes = [n for n in tree.children(path[-1]) if drafts[n - 1] == tokens[-1] and drafts[n - 1] >= 0]
        if not nodes:
            return tokens, path
        path.append(nodes[0])
        tokens.append(target[nodes[0]])


@pytest.mark.parametrize("text", TREES)
def test_the_longest_right_path(text: str) -> None:
    tree, rng = tree_from_paths(text), random.Random(3)
    width = tree.num_tokens
    drafts, target = [], []
    for _ in range(600):
        row = [0] * (width - 1)
        for token in range(width):
            for node, value in zip(tree.children(token), rng.sample(range(3), len(tree.children(token))), strict=True):
                row[node - 1] = value
        cut = rng.choice([width - 1, rng.randrange(width)])
        drafts.append(row[:cut] + [-1] * (width - 1 - cut))
        target.append([rng.randrange(3) for _ in range(width)])
    picked = PathPicker(tree.num_levels, width).accept(
        torch.tensor(drafts).int(), torch.tensor(target).int().flatten(), torch.tensor(tree.parents)
    )
    for row, (own, wanted) in enumerate(zip(drafts, target, strict=True)):
        tokens, path = _walk(tree, own, wanted)
        assert picked.num_new[row] == len(tokens)
        assert picked.token_ids[row].tolist() == tokens + [-1] * (width - len(tokens))
        assert picked.order[row].tolist() == path + list(range(len(path), width))
    assert picked.num_new.max() == tree.num_levels + 1


def test_kv_of_the_path_moves_to_its_places() -> None:
    table = RequestTable(3, 6, CPU, 4)
    table.page_table[1:] = torch.arange(1, 13).view(2, 6).int()
    table.num_computed[1:] = torch.tensor([6, 3])
    tree = tree_from_paths("[(0,), (1,), (0, 0), (1, 0)]")
    rows = torch.tensor([2, 1, 0], dtype=torch.int32)
    views = views_of(table, rows, 5)
    views.seq_lens.copy_(torch.tensor([8, 11, 5]))
    slots = torch.tensor([[12 * 2 + 3 + place for place in range(5)], [6 + place for place in range(5)], [0] * 5])
    views.slot_mapping.copy_(slots.flatten())
    layer = KVLayer(torch.arange(52 * 2.0).view(13, 4, 2, 1), torch.rand(13, 4, 2, 1).to(torch.float8_e4m3fn))
    before = [layer.k.clone().view(52, 2), layer.v.clone().view(52, 2).float()]
    order = torch.tensor([[0, 2, 4, 3, 4], [0, 1, 2, 3, 4], [0, 2, 2, 3, 4]])
    rows = torch.arange(15.0).unsqueeze(1)
    moved = PathPicker(2, 5).keep(replace(views, kv_layers=(layer,)), order, rows)
    for half, old in zip((layer.k.view(52, 2), layer.v.view(52, 2).float()), before, strict=True):
        for place in range(3):
            assert torch.equal(half[slots[0, place]], old[slots[0, order[0, place]]])
            assert torch.equal(half[slots[1, place]], old[slots[1, place]])
    assert moved is not None and moved[:5, 0].tolist() == [0, 2, 4, 3, 4]
    TreeStep(tree, 3, CPU).place(views, table)
    assert views.positions.view(3, 5).tolist() == [[3, 4, 4, 5, 5], [6, 7, 7, 8, 8], [0, 1, 1, 2, 2]]


def test_a_branch_attends_as_if_it_were_alone() -> None:
    """Each path of a tree, read as one guess after the other, gets the same from attention."""
    tree = tree_from_paths("[(0,), (1,), (0, 0), (1, 0)]")
    torch.manual_seed(0)
    table = torch.arange(1, 5).view(1, 4).int()
    k, v = torch.randn(2, 5, 4, 1, 8).unbind(0)
    q = torch.randn(5, 2, 8)
    mask = torch.tensor([tree.sees()])
    out = paged_attention(
        q, k, v, torch.tensor([0, 5]), torch.tensor([11]), torch.tensor([0]), table, 0.3, tree_mask=mask
    )  # fmt: skip
    flat_k, flat_v = k.view(20, 1, 8), v.view(20, 1, 8)
    for token in range(5):
        keys = [*range(6), *(6 + other for other in range(5) if tree.sees()[token][other])]
        slots = torch.tensor(keys) + 4
        scores = (q[token] @ flat_k[slots, 0].T * 0.3).softmax(-1)
        torch.testing.assert_close(out[token], scores @ flat_v[slots, 0])
    assert tree_visible(mask, torch.tensor([5]), 8)[0].tolist() == [True] + [False] * 7
