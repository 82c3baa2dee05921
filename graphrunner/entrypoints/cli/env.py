"""`graphrunner env`: what a bug report needs."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "numpy",
    "xgrammar",
    "torchao",
    "flashinfer-python",
    "fastapi",
    "uvicorn",
    "uvloop",
    "pyzmq",
    "msgspec",
)
COMPILERS = ("c++", "g++", "clang++")
QUESTION_TIMEOUT_S = 10


def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print what a bug report needs: versions, processor, devices. No paths of models, no environment."""
    from graphrunner import __version__

    rows = [("graphrunner", __version__), ("python", platform.python_version()), ("platform", platform.platform())]
    rows += [("container", "yes" if _is_container() else "no"), ("compiler", _compiler())]
    rows += [(package, _version(package)) for package in PACKAGES]
    rows += _machine()
    rows += _devices()
    if as_json:
        typer.echo(json.dumps(dict(rows), indent=2))
        return
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        typer.echo(f"{name:{width}}{value}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _is_container() -> bool:
    return any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))


def _compiler() -> str:
    """The first line of the C++ compiler that the CPU kernels would be built with."""
    for name in COMPILERS:
        if shutil.which(name):
            return _answer([name, "--version"])
    return "none: the CPU runs on plain torch"


def _answer(command: list[str]) -> str:
    """The first line that a program prints."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=QUESTION_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not answer: {type(error).__name__}"
    return (ended.stdout.splitlines() or [""])[0]


def _machine() -> list[tuple[str, str]]:
    import psutil

    memory = psutil.virtual_memory()
    cores = f"{psutil.cpu_count(logical=False)} physical, {psutil.cpu_count()} logical"
    return [
        ("processor", _processor()),
        ("cores", cores),
        ("memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available"),
    ]


def _processor() -> str:
    """Its name as Linux has it; elsewhere what Python knows."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _devices() -> list[tuple[str, str]]:
    import torch

    rows = [("threads", str(torch.get_num_threads())), ("vector unit", torch.backends.cpu.get_cpu_capability())]
    if not torch.cuda.is_available():
        return [*rows, ("cuda", "no device")]
    rows.append(("cuda", str(torch.version.cuda)))
    if shutil.which("nvidia-smi"):
        rows.append(("driver", _answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])))
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        capability = f"{device.major}.{device.minor}"
        rows.append((f"device {index}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB, {capability}"))
    return rows
