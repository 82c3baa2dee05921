"""Random weights of the right shapes: for benchmarks and tests of models that nobody downloads.

A tensor's values depend on its name, the seed and the kind of device, never on the order of creation.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from graphrunner.config.model_config import ModelConfig
from graphrunner.weights.shapes import expected_shapes

_EMBEDDING_STD = 0.02
_BIAS_STD = 0.02
_NORM_STD = 0.05


def fill_random_(name: str, tensor: Tensor, seed: int = 0, *, norm_center: float = 1.0) -> Tensor:
    """Fill a weight in place, on its device, so that activations keep a sensible size through many layers.

    Args:
        name: decides the distribution (norm, bias, embedding, projection) and, with `seed`, the values.
        norm_center: the neutral value of a norm weight; 0 where the model adds one itself (Gemma).
    """
    generator = torch.Generator(device=tensor.device).manual_seed((zlib.crc32(name.encode()) ^ seed) & 0xFFFFFFFF)
    if name.endswith("norm.weight"):
        return tensor.normal_(norm_center, _NORM_STD, generator=generator)
    if name.endswith("bias"):
        return tensor.normal_(0.0, _BIAS_STD, generator=generator)
    is_vocabulary = "embed" in name or "lm_head" in name
    fan_in = tensor.shape[-1] if tensor.ndim else 1
    return tensor.normal_(0.0, _EMBEDDING_STD if is_vocabulary else fan_in**-0.5, generator=generator)


def iterate_dummy(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, random weight) for a native architecture, each created where it will live."""
    norm_center = 0.0 if config.architecture.startswith("Gemma") else 1.0
    for name, shape in expected_shapes(config).items():
        weight = torch.empty(shape, dtype=dtype, device=device)
        yield name, fill_random_(name, weight, seed, norm_center=norm_center)
