"""What a decoder-only text model is, in numbers: the only description that layers and models read.

Built by config.hf_model_config.model_config_from_hf and weights.gguf_config.model_config_from_gguf.

Shapes use these letters elsewhere: H hidden_size, I intermediate_size, Hq query heads, Hk KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from graphrunner.config.checkpoint_quantization import CheckpointQuantization
from graphrunner.core.errors import ModelLoadError


class LayerType(StrEnum):
    """Which keys a layer's queries may see."""

    FULL = "full"
    SLIDING = "sliding"


class RopeScaling(StrEnum):
    """How rotary frequencies are stretched for contexts longer than those of pre-training."""

    NONE = "none"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LLAMA3 = "llama3"


class Activation(StrEnum):
    """The gate's activation in the feed-forward layer."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


#: Hugging Face class names that have a file of their own in graphrunner.models.
NATIVE_ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "SmolLM3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
    }
)

DTYPE_NAMES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of the full-attention layers, plus the local base of sliding layers.

    `theta` is the base. The numbers below `scaling` only matter for the types named beside them;
    `original_max_position` is the context length of pre-training (dynamic, yarn, llama3).
    `local_theta` is the base of sliding layers (Gemma 3); they are never scaled. None: one base for all.
    """

    theta: float = 10000.0
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: derived from factor
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    is_truncated: bool = True  # yarn: whether the correction range is rounded to whole dimensions
    local_theta: float | None = None

    def __post_init__(self) -> None:
        _require(self.theta > 0, "rope_theta", self.theta, "must be positive")
        _require(self.factor > 0, "rope factor", self.factor, "must be positive")
        _require(self.local_theta is None or self.local_theta > 0, "rope local theta", self.local_theta, "must be > 0")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only text model.

    Raises:
        ModelLoadError: a number contradicts another one; the message names the field and its value.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position: int = 2048
    tie_embeddings: bool = False
    attention_bias: bool = False
    """Whether q, k and v have a bias."""
    attention_out_bias: bool = False
    """Whether o_proj has a bias (Llama's attention_bias covers it; Qwen2 has none there)."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys get an RMSNorm over head_dim before the rotation (Qwen3, Gemma 3)."""
    activation: Activation = Activation.SILU
    sliding_window: int | None = None
    """A sliding layer's query sees this many newest tokens, itself included."""
    layer_types: tuple[LayerType, ...] = ()
    """One entry a layer; left empty it means full attention everywhere."""
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    query_scale: float | None = None
    """Gemma's query_pre_attn_scalar: scores are divided by its root. None: head_dim."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by this, rounded to the compute dtype first (Gemma: sqrt(hidden_size))."""
    no_rope_layers: frozenset[int] = frozenset()
    """Layer indices without rotary embedding (SmolLM3)."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"
    """The checkpoint's own dtype by name; what the engine computes in is decided elsewhere."""
    checkpoint_quantization: CheckpointQuantization | None = None
    """How the checkpoint packs its projections; None: as plain numbers."""
    hf_config: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)
    """The raw Hugging Face configuration, for the fallback that builds transformers' own model."""

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (LayerType.FULL,) * self.num_layers)
        for name in ("vocab_size", "hidden_size", "num_layers", "num_q_heads", "num_kv_heads", "head_dim"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")
        _require(self.max_position > 0, "max_position_embeddings", self.max_position, "must be positive")
        _require(self.norm_eps > 0, "norm_eps", self.norm_eps, "must be positive")
        if not self.is_native:
            return
        _require(self.intermediate_size > 0, "intermediate_size", self.intermediate_size, "must be positive")
        _require(
            self.num_q_heads % self.num_kv_heads == 0,
            "num_key_value_heads",
            self.num_kv_heads,
            f"must divide num_attention_heads={self.num_q_heads}",
        )
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "must be even for rotary embedding")
        _require(
            len(self.layer_types) == self.num_layers,
            "layer_types",
            f"{len(self.layer_types)} entries",
            f"must have num_hidden_layers={self.num_layers} entries",
        )
        has_sliding = LayerType.SLIDING in self.layer_types
        _require(
            not has_sliding or bool(self.sliding_window and self.sliding_window > 0),
            "sliding_window",
            self.sliding_window,
            "must be positive when layer_types has sliding layers",
        )

    @property
    def is_native(self) -> bool:
        """Whether graphrunner has a model file of its own for this architecture."""
        return self.architecture in NATIVE_ARCHITECTURES

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied by."""
        return float(self.query_scale or self.head_dim) ** -0.5


def _require(is_valid: bool, name: str, value: object, rule: str) -> None:
    if not is_valid:
        raise ModelLoadError(f"model config: {name}={value!r} {rule}")
