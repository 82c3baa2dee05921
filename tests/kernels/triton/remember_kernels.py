"""A start of three kernels as if on an H200: from what is known, else with a rehearsal; for the test beside it.

usage: python remember_kernels.py FOLDER
prints one JSON object: whether all were known, how many were ordered from the server, how many Triton looked for at
their launch, and of those that it looked for before, how many it found in its cache.
"""

import json
import sys
from pathlib import Path

from compile_elsewhere import launch_all, pretend_h200
from triton import knobs

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.compile_ahead import KernelCompiler
from graphrunner.kernels.triton.known_kernels import KnownKernels, asked_before_compiling

NAMES = ["gate", "partials", "residual"]


def main(folder: str) -> None:
    pretend_h200()
    found: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_told: found.append(cache_hit)
    known = KnownKernels(["three kernels"], Path(folder))
    is_known, num_ordered = known.load(), 0
    if not is_known:
        compiler = KernelCompiler(2)
        with compiler.rehearsal(known):
            launch_all(NAMES)
            num_ordered = len(compiler._orders)
    asked: list[object] = []
    with asked_before_compiling(lambda **told: bool(asked.append(told)) or True), runtime.compiling_only():
        launch_all(NAMES)
    print(json.dumps({"known": is_known, "ordered": num_ordered, "asked": len(asked), "found": found.count(True)}))


if __name__ == "__main__":
    main(sys.argv[1])
