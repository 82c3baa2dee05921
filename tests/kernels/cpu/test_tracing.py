"""The operators stay opaque nodes: torch.compile and torch.export go through them and give the same numbers."""

import torch
from cases import attention_case
from torch import Tensor

from graphrunner.kernels.cpu import ops


def mlp(x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    hidden = ops.norm_gate_up(x, norm, 1e-5, gate_up, "silu")
    return ops.rms_norm(ops.linear_residual(hidden, down, None, x), norm, 1e-5)


def arguments(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(rows, 48), torch.rand(48), torch.randn(2 * 64, 48), torch.randn(48, 64)


def test_compile_without_a_graph_break():
    args = arguments(3)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*args), mlp(*args))


def test_compile_sees_the_cache_writes():
    case = attention_case([(20, 1), (3, 4)], num_kv_heads=2, group=2, head_dim=48, page_size=16)
    compiled = torch.compile(ops.rope_store_attention, backend="aot_eager", fullgraph=True)
    for got, want in zip(case.run(compiled), case.run(ops.rope_store_attention), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_export_keeps_one_node_an_operator():
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            return mlp(x, norm, gate_up, down)

    args = arguments(3)
    program = torch.export.export(Model(), args)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names == [f"graphrunner.cpu_{name}.default" for name in ("gate_up", "linear", "rms_norm")]
    torch.testing.assert_close(program.module()(*args), mlp(*args))
