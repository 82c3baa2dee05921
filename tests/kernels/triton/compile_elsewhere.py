"""Launch three kernels in a rehearsal as if for an H200, and look for them in the cache; for the test beside it.

usage: python compile_elsewhere.py forwards|backwards
prints one JSON object: how many were ordered from the server, and how many Triton then found in its cache.
"""

import json
import sys

import torch
from rehearsal import StreamDriver
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from graphrunner.kernels.triton import activation, decode_linear, runtime, sample
from graphrunner.kernels.triton.compile_ahead import KernelCompiler


def launch_all(names: list[str]) -> bool:
    """Whether anything was written."""
    x = torch.full((8, 2048), 7.0, dtype=torch.bfloat16)
    weight = torch.ones(1024, 1024, dtype=torch.bfloat16)
    residual = torch.full((32, 1024), 3.0, dtype=torch.bfloat16)
    launches = {
        "gate": lambda: activation.gate_mul(x, is_gelu=False),
        "partials": lambda: sample.argmax_partials(x),
        "residual": lambda: decode_linear.linear_residual(residual.clone(), weight, None, residual),
    }
    for name in names:
        launches[name]()
    return bool((residual != 3.0).any())


def pretend_h200() -> None:
    """Kernels are made as there."""
    driver.set_active(StreamDriver(GPUTarget("cuda", 90, 32)))
    runtime.use_dependent_launch = lambda device: True
    runtime.num_multiprocessors = lambda device: 132
    runtime.device_key = lambda device: "sm90x132"


def main(direction: str) -> None:
    pretend_h200()
    names = ["gate", "partials", "residual"]
    names = names if direction == "forwards" else names[::-1]
    found: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_told: found.append(cache_hit)
    compiler = KernelCompiler(2)
    with compiler.rehearsal():
        was_touched = launch_all(names)
        num_ordered = len(compiler._orders)
    with runtime.compiling_only():
        launch_all(names)
    print(json.dumps({"ordered": num_ordered, "found": sum(found), "was_touched": was_touched}))


if __name__ == "__main__":
    main(sys.argv[1])
