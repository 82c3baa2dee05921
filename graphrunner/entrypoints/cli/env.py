"""`graphrunner env`: what a bug report needs."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "gguf", "xgrammar", "fastapi", "uvicorn")


def env() -> None:
    """Print what a bug report needs: versions, processor, devices. No paths of models, no environment."""
    from graphrunner import __version__

    rows = [("graphrunner", __version__), ("python", platform.python_version()), ("platform", platform.platform())]
    rows += [(package, _version(package)) for package in PACKAGES]
    rows += _machine()
    rows += _devices()
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        typer.echo(f"{name:{width}}{value}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _machine() -> list[tuple[str, str]]:
    import psutil

    memory = psutil.virtual_memory()
    cores = f"{psutil.cpu_count(logical=False)} physical, {psutil.cpu_count()} logical"
    return [
        ("processor", platform.processor() or platform.machine()),
        ("cores", cores),
        ("memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available"),
    ]


def _devices() -> list[tuple[str, str]]:
    import torch

    rows = [("threads", str(torch.get_num_threads())), ("vector unit", torch.backends.cpu.get_cpu_capability())]
    if not torch.cuda.is_available():
        return [*rows, ("cuda", "no device")]
    rows.append(("cuda", str(torch.version.cuda)))
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        capability = f"{device.major}.{device.minor}"
        rows.append((f"device {index}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB, {capability}"))
    return rows
