"""Launches that are only compiled: nothing runs, and everything runs again afterwards."""

import pytest
import torch

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.norms import rms_norm


class Kernel:
    """Stands for a jitted function and keeps what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getitem__(self, grid):
        return lambda *operands, **settings: self.calls.append(("run", grid, operands, settings))

    def warmup(self, *operands, grid, **settings) -> None:
        self.calls.append(("compile", grid, operands, settings))


def test_compiling_only_launches_nothing() -> None:
    kernel = Kernel()
    launch = runtime.Launch(kernel, (2, 3), (1, 2.0), {"BLOCK": 16})
    with runtime.compiling_only():
        launch.run()
        runtime.launch(kernel, torch.Size([4]), 5, BLOCK=8)
    launch.run()
    assert kernel.calls == [
        ("compile", (2, 3), (1, 2.0), {"BLOCK": 16}),
        ("compile", (4,), (5,), {"BLOCK": 8}),
        ("run", (2, 3), (1, 2.0), {"BLOCK": 16}),
    ]


def test_an_error_inside_leaves_launches_running() -> None:
    kernel = Kernel()
    with pytest.raises(KeyError), runtime.compiling_only():
        raise KeyError("a forward that breaks")
    runtime.launch(kernel, (1,))
    assert kernel.calls == [("run", (1,), (), {})]


@pytest.mark.cuda
def test_kernels_are_compiled_elsewhere_before_they_run(device, tmp_path, monkeypatch) -> None:
    from graphrunner.kernels.triton.compile_ahead import KernelCompiler

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # Wider than any other test's rows: what this process has compiled already would not be compiled ahead.
    x = torch.randn(3, 16384 + 64, device=device, dtype=torch.bfloat16)
    weight = torch.rand(x.shape[1], device=device)
    compiler = KernelCompiler(2)
    with compiler.rehearsal():
        untouched = rms_norm(x, weight, 1e-6)
    del untouched
    num_files = len(list(tmp_path.rglob("*.cubin"))) + len(list(tmp_path.rglob("*.so")))
    assert list(tmp_path.rglob("*.cubin")), "nothing was compiled ahead"
    wanted = torch.nn.functional.rms_norm(x.float(), (x.shape[1],), weight, 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).float(), wanted, atol=2e-2, rtol=2e-2)
    assert num_files == len(list(tmp_path.rglob("*.cubin"))) + len(list(tmp_path.rglob("*.so")))
