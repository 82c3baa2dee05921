"""Compile the C++ kernels once per machine and load them.

The library lands in the user's cache under a name made of everything that shapes its bytes: the sources, the torch
it links against, the compiler and the processor it is tuned for. Two processes that start together build once.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from graphrunner.config.env import cache_dir

_LOGGER = logging.getLogger(__name__)
_SOURCE_DIR = Path(__file__).parent / "csrc"
_COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: the kernels rely on NaN and on exact rounding where they say so.
# -Wno-psabi: vectors wider than the baseline ABI are passed between our own inlined functions only.
_FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wno-psabi")
_BUILD_TIMEOUT_S = 600


_built: list[Path] = []


class KernelBuildError(RuntimeError):
    """The C++ kernels could not be compiled; the message says why in one line."""


@cache
def load_library() -> bool:
    """Make torch.ops.graphrunner.cpu_* available, building the library at first use on this machine.

    Returns:
        Whether the operators exist. False, with one warning, when there is no compiler or it fails: callers then
        use the plain torch twins.
    """
    try:
        path = _built_library()
        torch.ops.load_library(path)
    except (KernelBuildError, OSError) as error:
        _LOGGER.warning("CPU kernels are off, decoding falls back to plain torch and is slower: %s", error)
        return False
    return True


def _built_library() -> Path:
    compiler = _find_compiler()
    directory = cache_dir() / "cpu_kernels"
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / f"kernels-{_build_key(compiler)}.so"
    if library.exists():
        return library
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            # A line of its own above warning level would be lost with the default log level, and a silent wait of
            # some seconds at first start would puzzle: this one is said once per machine.
            _LOGGER.warning("Building the CPU kernels (once on this machine, about 20 s)")
            _compile(compiler, library)
            _built.append(library)
    return library


def num_libraries_built() -> int:
    """How many libraries this process had to compile; 0 when all were found on disk."""
    return len(_built)


def _find_compiler() -> str:
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise KernelBuildError(f"no C++ compiler found (looked for {', '.join(_COMPILERS)})")


def _build_key(compiler: str) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCE_DIR.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    for part in (torch.__version__, version, _processor(), " ".join(_FLAGS)):
        digest.update(part.encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on: the instruction sets of this processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"


def _compile(compiler: str, library: Path) -> None:
    """Compile each source by itself, side by side, then link under a temporary name and move into place."""
    torch_dir = Path(torch.__file__).parent
    include = [f"-I{torch_dir / 'include'}", f"-I{torch_dir / 'include/torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        sources = sorted(_SOURCE_DIR.glob("*.cpp"))
        objects = [str(Path(work) / f"{source.stem}.o") for source in sources]
        _run_all(
            [
                [compiler, *_FLAGS, abi, *include, "-c", str(source), "-o", target]
                for source, target in zip(sources, objects)
            ]
        )
        # Linked without -fopenmp: the OpenMP symbols must resolve to the runtime torch brings, or two thread pools
        # would compete for the cores.
        linked = str(Path(work) / "kernels.so")
        _run_all([[compiler, "-shared", *objects, f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-lc10", "-o", linked]])
        os.replace(linked, library)


def _run_all(commands: list[list[str]]) -> None:
    processes = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    failures = []
    for process in processes:
        try:
            _, errors = process.communicate(timeout=_BUILD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            errors = f"compiler took longer than {_BUILD_TIMEOUT_S} s"
        if process.returncode != 0:
            failures.append(errors)
    if failures:
        lines = failures[0].strip().splitlines() or ["no message"]
        reason = next((line for line in lines if "error" in line), lines[-1])
        raise KernelBuildError(f"compiler failed: {reason}")
