"""Compile kernels for a card that this machine lacks, a process each; for the test beside it.

usage: python compile_orders.py FILE, which holds a JSON list of Triton's descriptions of specialised kernels
prints a JSON object: the descriptions that do not compile, and why.
"""

import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from graphrunner.kernels.triton.compile_server import OfflineDriver, run_forked


def main() -> None:
    """Compile all of the file's."""
    orders = json.loads(Path(sys.argv[1]).read_text())
    driver.set_active(OfflineDriver(GPUTarget("cuda", 90, 32)))
    import_module("graphrunner.kernels.triton.gpu_ops")
    with tempfile.TemporaryDirectory() as folder:

        def compile_one(number: int) -> None:
            failure = Path(folder) / str(number)
            failure.write_text("the process ended")
            module, _, name = json.loads(orders[number])["name"].rpartition(".")
            try:
                getattr(import_module(module), name).preload(orders[number])
                failure.unlink()
            except Exception as cause:
                failure.write_text(str(cause)[-500:])

        run_forked([lambda number=number: compile_one(number) for number in range(len(orders))], os.cpu_count() or 1)
        print(json.dumps({orders[int(path.name)]: path.read_text() for path in Path(folder).iterdir()}))


if __name__ == "__main__":
    main()
