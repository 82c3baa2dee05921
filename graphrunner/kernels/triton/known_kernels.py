"""The kernels of a start, remembered for the next start with the same settings, which need not rehearse.

Note [known kernels]. A rehearsal runs dozens of forwards to learn what will be launched, and on the same sources, card
and settings learns the same each time. So what it met is kept, under a digest of those; where all of it is still in
Triton's own cache, a start loads it from there and is done. A list that is wrong costs time and nothing else: a kernel
that it lacks is loaded, or compiled, when it is launched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from graphrunner.config.cache_file import digest, read_cached, write_cached
from graphrunner.config.env import cache_dir
from graphrunner.telemetry.log import get_logger

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

log = get_logger(__name__)

_FORMAT = "1"
_OUR_MODULES = f"{__name__.rpartition('.')[0]}."


class _Process:
    """Whether this process has loaded kernels: Triton does not name those to a later rehearsal."""

    is_fresh = True


class KnownKernels:
    """The list of one kind of start.

    Args:
        settings: texts of all that decides what is launched, but for versions and our own sources.
        folder: None is `kernels` in the user's cache.
    """

    def __init__(self, settings: Sequence[str], folder: Path | None = None) -> None:
        self._settings = tuple(settings)
        self._folder = folder

    def load(self) -> bool:
        """Load what is known; whether it is all there. If not, nothing is loaded, and a rehearsal must tell."""
        try:
            text = read_cached(self._path())
            orders = [] if text is None else json.loads(text)
            if not orders or not all(map(_is_ours, orders)) or not _are_cached(orders):
                return False
            _Process.is_fresh = False
            for order in orders:
                preload(order)
        except Exception as cause:  # whatever a cache of other days makes Triton raise
            log.info("known kernels are rehearsed again: %s: %s", type(cause).__name__, cause)
            return False
        return True

    def save(self, orders: Collection[str]) -> None:
        """Keep what a rehearsal met, unless it cannot have met all."""
        is_fresh, _Process.is_fresh = _Process.is_fresh, False
        if not is_fresh or not orders:
            return
        try:
            write_cached(self._path(), json.dumps(list(orders)))
        except (OSError, RuntimeError) as cause:  # the second: a user without a home
            log.info("the list of kernels could not be kept: %s", cause)

    def _path(self) -> Path:
        import torch
        import triton
        from triton._C.libtriton import get_cache_invalidating_env_vars

        versions = (torch.__version__, triton.__version__)
        folder = self._folder if self._folder is not None else cache_dir() / "kernels"
        variables = sorted(get_cache_invalidating_env_vars().items())
        return folder / f"{digest(_FORMAT, *versions, str(variables), _sources(), *self._settings)[:24]}.json"


def preload(order: str) -> CompiledKernel:
    """Compile one kernel, or load it from Triton's cache, into this process.

    Args:
        order: Triton's own description of a specialised kernel, in JSON.
    """
    from graphrunner.kernels.triton.runtime import name_kernel

    module, _, name = json.loads(order)["name"].rpartition(".")
    kernel = getattr(import_module(module), name)
    name_kernel(kernel)
    return kernel.preload(order)


@contextmanager
def asked_before_compiling(hook: Callable[..., bool]) -> Iterator[None]:
    """Inside, Triton asks `hook` before it compiles or loads a kernel, and leaves it alone on True."""
    from triton import knobs

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def _is_ours(order: str) -> bool:
    """Whether loading this kernel imports nothing but our kernels: no file in a cache may run other code."""
    return str(json.loads(order)["name"]).startswith(_OUR_MODULES)


def _are_cached(orders: Sequence[str]) -> bool:
    from graphrunner.kernels.triton.compile_ahead import is_cached

    missing: list[str] = []

    def note(*, fn, compile, **_told) -> bool:  # type: ignore[no-untyped-def]  # Triton's names
        order = str(compile["specialization_data"])
        if not is_cached(fn.jit_function, compile, order):
            missing.append(order)
        return True

    with asked_before_compiling(note):
        for order in orders:
            preload(order)
            if missing:
                return False
    return True


def _sources() -> str:
    """A digest of this package: any line of it may decide what is launched."""
    root = Path(__file__).parents[2]
    return digest(*(path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))))
