"""Compile a start's kernels side by side before the first of them runs.

Note [compiling ahead]. A kernel takes up to two seconds to compile, and a C compiler half a second for its launcher;
met one after another in a first forward, those of a new model keep a start waiting for most of a minute on a machine
whose other cores have nothing to do. So the forwards are run once with launches that only tell which kernels they
would run; those that Triton's on-disk cache lacks are compiled into it by other processes (see compile_server), which
were started, and did their imports, while weights were loaded. Whatever goes wrong there costs time and nothing else:
a kernel that is not in the cache when it is launched is compiled then.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, cast

from graphrunner.kernels.triton.known_kernels import KnownKernels, asked_before_compiling
from graphrunner.telemetry.log import get_logger

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction, JitFunctionInfo

log = get_logger(__name__)

_MAX_WORKERS = 32
_LONGEST_WAIT_S = 120.0


class KernelCompiler:
    """A compile server, idle until a rehearsal ends. Nothing of Triton or torch is loaded to start it.

    Args:
        num_workers: kernels compiled at a time.
        command: the server's; None is our own.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, num_workers: int, command: list[str] | None = None) -> None:
        # In a session of its own: a terminal's Ctrl-C is for the engine, which ends the server.
        self._process = subprocess.Popen(
            command or server_command(num_workers), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True, text=True,
        )  # fmt: skip
        self._orders: dict[str, None] = {}
        self._met: dict[str, None] = {}

    @contextmanager
    def rehearsal(self, known: KnownKernels | None = None) -> Iterator[None]:
        """Inside, kernels are not run: what they would have written stays as it was. On leaving, all are compiled.

        Once only: the server ends with it.

        Args:
            known: remembers what was met.
        """
        from graphrunner.kernels.triton import runtime

        with asked_before_compiling(self._order), runtime.compiling_only():
            yield
        self._finish()
        if known is not None:
            known.save(self._met)

    def close(self) -> None:
        """End the server and its workers. Idempotent."""
        with suppress(ProcessLookupError, PermissionError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def _order(self, *, fn: JitFunctionInfo, compile: Mapping[str, object], **_told: object) -> bool:
        """Triton's hook before it compiles, with its names; whether it shall not."""
        order = str(compile["specialization_data"])
        self._met[order] = None
        if is_cached(fn.jit_function, compile, order):
            return False
        self._orders[order] = None
        return True

    def _finish(self) -> None:
        log.debug("%d kernels to compile", len(self._orders))
        problem: object = None
        try:
            if self._orders:
                self._process.communicate("\n".join(self._orders), timeout=_LONGEST_WAIT_S)
                problem = self._process.returncode and f"the compiling process ended with {self._process.returncode}"
        except (OSError, subprocess.TimeoutExpired) as cause:
            problem = cause
        if problem:
            log.warning("kernels are compiled one by one, as they are met: %s", problem)
        self.close()  # at once where all were found on disk: its imports need not be waited for


def server_command(num_workers: int) -> list[str]:
    """Our own server, in this interpreter's world: it finds the modules that this process finds."""
    start = "from graphrunner.kernels.triton.compile_server import main"
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}; main({num_workers})"]


def start_kernel_compiler() -> KernelCompiler | None:
    """One with a worker a core; None where there is one core only, or no process can be started."""
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    try:
        return KernelCompiler(min(num_cores, _MAX_WORKERS)) if num_cores > 1 else None
    except OSError as cause:
        log.warning("kernels are compiled one by one, as they are met: %s", cause)
        return None


def is_cached(kernel: JITFunction, told: Mapping[str, object], order: str) -> bool:
    """Whether Triton would find this specialised kernel on disk: the first half of its `compile`."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager
    from triton.runtime.driver import driver

    backend = make_backend(driver.active.get_current_target())
    described = json.loads(order)["options"].items()
    options = backend.parse_options({name: tuple(v) if isinstance(v, list) else v for name, v in described})
    (attributes,) = cast("list[dict]", told["configs"])
    source = ASTSource(kernel, told["signature"], told["constants"], attributes)
    key = get_cache_key(source, backend, options, get_cache_invalidating_env_vars())
    files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(f"{source.name[:150]}.json")
    return bool(files)
