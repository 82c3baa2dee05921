"""Compiled graphs on disk, found by everything that shapes their machine code."""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor import CompiledArtifact

from graphrunner.config.env import cache_dir
from graphrunner.execution.traced import TracedForward
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)

_FORMAT = "1"


class ArtifactCache:
    """One folder under the user's cache, one file a graph. Processes may share it: files appear whole or not at all.

    Args:
        folder: None is `inductor` in the user's cache.

    Attributes:
        num_compiled, num_from_cache: artefacts made, and found on disk, since the start.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder if folder is not None else cache_dir() / "inductor"
        self.num_compiled = 0
        self.num_from_cache = 0
        self._met: dict[str, CompiledArtifact] = {}

    def get(self, traced: TracedForward) -> tuple[CompiledArtifact, bool]:
        """The compiled graph, and whether it was there. Cost: seconds when it has to be compiled."""
        name = artifact_name(traced)
        is_found = True
        if name not in self._met:
            self._met[name], is_found = self._load_or_compile(traced, self._folder / f"{name}.bin")
        return self._met[name], is_found

    def clear(self) -> None:
        """Forget what is in memory; what is on disk stays."""
        self._met.clear()

    def _load_or_compile(self, traced: TracedForward, path: Path) -> tuple[CompiledArtifact, bool]:
        if path.exists():
            try:
                artifact = CompiledArtifact.load(path=str(path), format="binary")
            except Exception as cause:  # whatever a damaged file makes torch raise
                log.warning("%s cannot be read and is compiled again: %s", path.name, cause)
            else:
                self.num_from_cache += 1
                return artifact, True
        artifact = _compile(traced)
        self.num_compiled += 1
        self._save(artifact, path)
        return artifact, False

    def _save(self, artifact: CompiledArtifact, path: Path) -> None:
        """Write beside and move into place. A folder that cannot be written costs the next start, not this one."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=".part")
            os.close(handle)
            artifact.save(path=name, format="binary")
            os.replace(name, path)
        except (OSError, RuntimeError) as cause:
            log.warning("a compiled graph could not be kept: %s", cause)


def artifact_name(traced: TracedForward) -> str:
    """A digest of the graph, torch, this package's format, the processor and the number of threads."""
    is_cuda = any(tensor.is_cuda for tensor in traced.inputs)
    capability = torch.cuda.get_device_name() if is_cuda else torch.backends.cpu.get_cpu_capability()
    parts = (_FORMAT, torch.__version__, platform.machine(), capability, str(torch.get_num_threads()), traced.text())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _compile(traced: TracedForward) -> CompiledArtifact:
    # Outside of inference mode: the compiler runs functions whose inputs it changes, and asks for version counters.
    with torch.inference_mode(False), torch.no_grad():
        inputs = [_with_version(tensor) for tensor in traced.inputs]
        return torch._inductor.standalone_compile(traced.module, inputs, dynamic_shapes="from_example_inputs")


def _with_version(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that counts its versions, which those made in inference mode do not."""
    if not tensor.is_inference():
        return tensor
    place = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return place.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
