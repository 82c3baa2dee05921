"""Compile a forward's kernels side by side before the first of them runs.

A kernel compiles in about a second; met one after another in a first forward, those of a new model keep a start waiting
for most of a minute on a machine whose other cores have nothing to do.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from triton.runtime._async_compile import AsyncCompileMode

from graphrunner.kernels.triton import runtime

_MAX_THREADS = 16


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside, kernels are handed to compiling threads and not run; on leaving, all of them are there.

    A kernel that the compiler refuses is refused again, with its message, where it is launched.
    """
    with (
        ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads,
        AsyncCompileMode(threads, ignore_errors=True),
        runtime.compiling_only(),
    ):
        yield
