"""`deterministic`: what it needs, and what it says at start-up about what it leaves out. See docs/deterministic.md."""

from __future__ import annotations

import torch

from graphrunner.config.engine_config import EngineConfig, GraphBackend
from graphrunner.core.errors import ConfigError
from graphrunner.layers.linear import PackedLinear
from graphrunner.models.causal_lm import CausalLM
from graphrunner.models.registry import LanguageModel
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)

_COMPILED = (GraphBackend.INDUCTOR, GraphBackend.PIECEWISE)
NOTICE = (
    "deterministic: the same tokens alone and in any batch, in a graph and eagerly, in one chunk or many; "
    "prompts are slower. Not covered: another device or library version; embeddings; drafts of requests that sample"
)


def require_deterministic(config: EngineConfig, model: LanguageModel, device: torch.device) -> None:
    """Refuse what cannot keep the promise, and say once what it does not cover.

    Raises:
        ConfigError: names what stands against it.
    """
    if not config.load.deterministic:
        return
    if not isinstance(model, CausalLM):
        problem = f"needs a native model; {model.config.architecture} runs through transformers' own products"
        raise ConfigError("deterministic", True, problem)
    for name in ("decode_graph", "prefill_graph"):
        backend = getattr(config.graph, name)
        if backend in _COMPILED:
            raise ConfigError(name, backend.value, "compiled steps round otherwise than eager ones: not deterministic")
    if device.type == "cuda":
        packed = [module.packed for module in model.modules() if isinstance(module, PackedLinear)]
        layout = next((weight.layout.value for weight in packed if not weight.is_dense), None)
        if layout is not None:
            raise ConfigError("deterministic", True, f"covers dense weights on a GPU; these are {layout}")
        if any(module.num_inputs % 16 for module in model.modules() if isinstance(module, PackedLinear)):
            raise ConfigError("deterministic", True, "needs layer widths that 16 divides on a GPU")
    log.warning(NOTICE)
