"""graphrunner: an LLM inference engine whose every forward pass goes through one runner surface."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from graphrunner.core.outputs import RequestOutput
    from graphrunner.core.sampling_params import SamplingParams
    from graphrunner.entrypoints.llm import LLM


def __getattr__(name: str) -> object:
    """Import the public names at first use, so that `import graphrunner` does not import torch."""
    if name == "LLM":
        from graphrunner.entrypoints.llm import LLM

        return LLM
    if name == "SamplingParams":
        from graphrunner.core.sampling_params import SamplingParams

        return SamplingParams
    if name == "RequestOutput":
        from graphrunner.core.outputs import RequestOutput

        return RequestOutput
    raise AttributeError(f"module 'graphrunner' has no attribute {name!r}")
