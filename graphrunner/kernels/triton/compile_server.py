"""The other end of compile_ahead: a process without a GPU that compiles kernels into Triton's on-disk cache.

It imports what a kernel needs once, then gives each kernel a fork of itself: Triton holds Python's lock while it
compiles, so threads would take turns. A fork that breaks, or takes too long, leaves its kernel to whoever launches it.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import driver
from triton.runtime.cache import triton_key

from graphrunner.kernels.triton.known_kernels import preload

_LONGEST_COMPILE_S = 60


@dataclass(frozen=True, slots=True)
class OfflineDriver:
    """Tells Triton's compiler about a card that this process never opens."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Any: nothing runs."""
        return 0


def compile_kernel(order: str) -> None:
    """Compile one kernel, and the C function that launches it.

    Args:
        order: Triton's own description of a specialised kernel, in JSON.
    """
    described = json.loads(order)
    capability = int(described["options"]["arch"].removeprefix("sm"))
    driver.set_active(OfflineDriver(GPUTarget("cuda", capability, 32)))
    compiled = preload(order)
    CudaLauncher(compiled.src, compiled.metadata)


def run_forked(tasks: Sequence[Callable[[], object]], num_workers: int) -> None:
    """Run each task in a process of its own, `num_workers` at a time; stop early when the parent has gone."""
    parent, running = os.getppid(), 0
    for task in tasks:
        if running == num_workers:
            os.wait()
            running -= 1
        if os.getppid() != parent:
            return
        if os.fork() == 0:
            signal.alarm(_LONGEST_COMPILE_S)
            with suppress(BaseException):
                task()
            os._exit(0)
        running += 1
    while running:
        os.wait()
        running -= 1


def main(num_workers: int) -> None:
    """Compile what standard input asks for, a line a kernel, and end when all of it is there."""
    # Once before the forks, for all of them: the imports, and the hash of Triton itself, which is in every key.
    import_module("graphrunner.kernels.triton.gpu_ops")
    triton_key()
    run_forked([CudaUtils], 1)  # what every launch needs, while nothing has been asked for yet
    orders = sys.stdin.read().splitlines()
    # Those with the most parameters take longest, and one that starts last would be waited for.
    orders.sort(key=len, reverse=True)
    run_forked([lambda order=order: compile_kernel(order) for order in orders], num_workers)
