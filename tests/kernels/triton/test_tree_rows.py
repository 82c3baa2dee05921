"""Verify steps over trees: each kernel against its twin."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from draft_views import views_of

from graphrunner.core.draft_tree import DraftTree, TreeGrowth
from graphrunner.core.forward_batch import KVLayer
from graphrunner.kernels.triton import tree_rows
from graphrunner.runner.request_table import RequestTable
from graphrunner.runner.tree_step import TreeStep
from graphrunner.sampling.tree import move_kv, reordered, walk


def _parents(rng: random.Random, num_nodes: int) -> list[int]:
    """Of a tree whose parents come before their children, not always level by level."""
    return [rng.randrange(node) for node in range(1, num_nodes + 1)]


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 7])
@pytest.mark.parametrize("is_grown", [False, True])
def test_trees_are_placed_like_the_twin(device, num_nodes: int, is_grown: bool) -> None:
    rng, cpu = random.Random(num_nodes), torch.device("cpu")
    table = RequestTable(200, 4, cpu, num_nodes)
    table.draft_parents[1:] = torch.tensor([_parents(rng, num_nodes) for _ in range(199)]).int()
    rows = torch.tensor([3, 0, 150, 1, 6, 0] + list(range(7, 140)), dtype=torch.int32)
    shape = DraftTree(tuple(sorted(_parents(rng, min(num_nodes, 2)))))
    tree = TreeGrowth(num_nodes, num_nodes, 2) if is_grown else shape
    views = views_of(table, rows, tree.num_tokens)
    views.seq_lens.copy_(torch.arange(len(rows)) + tree.num_tokens)
    step = TreeStep(tree, len(rows) + 3, cpu)
    given = [tensor.to(device).clone() for tensor in (views.seq_lens, step.parents, views.positions, rows, step.mask)]
    step.place(views, table)
    tree_rows.place_tree(
        *given[:3], request_rows=given[3], mask=given[4],
        draft_parents=table.draft_parents.to(device) if is_grown else None,
    )  # fmt: skip
    assert given[1].cpu().equal(step.parents) and given[4].cpu().equal(step.mask)
    assert given[2].cpu().equal(views.positions)


@pytest.mark.parametrize("num_nodes", [1, 3, 7])
def test_paths_are_walked_like_the_twin(device, num_nodes: int) -> None:
    rng, width = random.Random(5), num_nodes + 1
    parents = [_parents(rng, num_nodes) for _ in range(300)]
    drafts, target = [], []
    for row in parents:
        values = [rng.sample(range(num_nodes + 1), num_nodes) if rng.random() < 0.5 else list(range(num_nodes))][0]
        cut = rng.choice([num_nodes, rng.randrange(width)])
        drafts.append(values[:cut] + [-1] * (num_nodes - cut))
        # What most often follows a token is one of its children.
        children = [[values[node - 1] for node in range(1, width) if row[node - 1] == token] for token in range(width)]
        target.append([rng.choice(own) if own and rng.random() < 0.8 else rng.randrange(9) for own in children])
    given = (torch.tensor(drafts).int(), torch.tensor(target).int().flatten(), torch.tensor(parents))
    tokens, num_new, order = (each.cpu() for each in tree_rows.walk(*(each.to(device) for each in given)))
    twin = walk(*given, num_nodes)
    assert tokens.equal(twin.token_ids) and num_new.equal(twin.num_new) and order.equal(twin.order)
    assert num_new.max() > min(num_nodes, 3)


@pytest.mark.parametrize(
    ("dtype", "heads", "columns"),
    [(torch.bfloat16, (3, 2), 24), (torch.float8_e4m3fn, (1, 5), 7), (torch.bfloat16, (9, 80), 0)],
    ids=["words", "bytes", "long rows"],
)
def test_rows_move_like_the_twin(device, dtype: torch.dtype, heads: tuple[int, ...], columns: int) -> None:
    """Chains of moves too: a place's own row goes on to another place."""
    cpu = torch.device("cpu")
    table = RequestTable(3, 6, cpu, 7)
    views = views_of(table, torch.tensor([2, 1, 3], dtype=torch.int32), 8)
    views.slot_mapping.copy_(torch.randperm(52)[:24])
    order = torch.tensor([[0, 2, 4, 7, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7], [0, 3, 5, 6, 7, 5, 6, 7]])
    layers = tuple(
        KVLayer(*(torch.randn(13, 4, count, 8 if columns != 7 else 3).to(dtype) for _ in range(2))) for count in heads
    )
    rows = torch.randn(24, columns).to(dtype) if columns else None
    halves = [half.to(device).clone() for layer in layers for half in (layer.k, layer.v)]
    given = None if rows is None else rows.to(device).clone()
    tree_rows.move_rows(tree_rows.row_table(halves, device), views.slot_mapping.to(device), order.to(device), given)
    move_kv(replace(views, kv_layers=layers), order)
    wanted = [half for layer in layers for half in (layer.k, layer.v)]
    for half, twin in zip(halves, wanted, strict=True):
        assert half.cpu().view(torch.uint8).equal(twin.view(torch.uint8))
    if rows is not None and given is not None:
        assert given.cpu().view(torch.uint8).equal(reordered(rows.view(torch.uint8), order))
