"""Every setting of the engine: one frozen dataclass a section, checked when made, resolved once at start-up.

A field's help text stands under it; the command line prints it.
"""

from dataclasses import dataclass, field
from enum import Enum

from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.errors import ConfigError


class GraphBackend(Enum):
    """How a phase's forwards are recorded."""

    AUTO = "auto"
    FULL = "full"
    BREAKABLE = "breakable"
    PIECEWISE = "piecewise"
    INDUCTOR = "inductor"
    RECORDING = "recording"
    OFF = "off"


class CapturePolicy(Enum):
    """When shapes are recorded."""

    EAGER = "eager"
    LAZY = "lazy"
    OFF = "off"


class LogFormat(Enum):
    """How a line of the log is written."""

    TEXT = "text"
    JSON = "json"


class KVCacheDtype(Enum):
    """In which numbers keys and values are kept."""

    AUTO = "auto"
    FP8 = "fp8"
    FP8_E4M3 = "fp8_e4m3"  # the same under its full name


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Which model, and how its weights come in."""

    model: str | None = None
    """Hub id, folder of safetensors, or GGUF file; None is the embedded SmolLM2-135M-Instruct."""
    tokenizer: str | None = None
    """Where the tokenizer comes from, if not from the model."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer; prompts are token ids and outputs have no text."""
    dtype: str = "auto"
    """float32, bfloat16, float16 or auto: float32 on a CPU; on a GPU the checkpoint's, and bfloat16 for a GGUF that is
    not in float32."""
    device: str = "auto"
    """cpu, cuda or auto."""
    quantization: str | None = None
    """Pack the projections as they are loaded: int8, int4, fp8 or fp8_block; None: as the checkpoint has them."""
    load_format: str = "auto"
    """auto, or dummy for seeded random weights from the config alone."""
    trust_remote_code: bool = False
    """Run model code that comes with a checkpoint."""
    allow_pickle: bool = False
    """Accept pickled checkpoints, which can run code when read."""
    deterministic: bool = False
    """The same tokens for a request alone, in any batch, in graph or eager, chunked or not; slower prompts."""
    model_impl: str = "auto"
    """auto, native, or transformers (any Hugging Face causal LM through the fallback)."""
    seed: int = 0
    """Seed of dummy weights and of the noise of requests that bring no seed."""

    def __post_init__(self) -> None:
        known = self.load_format in ("auto", "dummy")
        _check(known, "load_format", self.load_format, "must be auto or dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV pages."""

    page_size: int = 16
    """Tokens a page."""
    num_pages: int | None = None
    """Pages in the pool, the reserved page 0 included; None sizes it from what is free."""
    gpu_memory_utilization: float = 0.9
    """Share of the card's memory that weights, graphs and pages may fill together."""
    cpu_kv_cache_mib: int = 512
    """Most MiB for the pages on a CPU, when num_pages is None."""
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    """Keep keys and values in the model's dtype (auto), or in e4m3: half the memory of bfloat16 for each token."""
    enable_prefix_caching: bool = True
    """Keep finished prompts' pages for requests that start the same way."""

    def __post_init__(self) -> None:
        _check(1 <= self.page_size <= 256, "page_size", self.page_size, "must be from 1 to 256")
        _check(self.num_pages is None or self.num_pages >= 2, "num_pages", self.num_pages, "must be at least 2")
        share = self.gpu_memory_utilization
        _check(0.0 < share <= 1.0, "gpu_memory_utilization", share, "must be above 0 up to 1")
        _check(self.cpu_kv_cache_mib >= 1, "cpu_kv_cache_mib", self.cpu_kv_cache_mib, "must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How steps are filled."""

    max_num_seqs: int = 256
    """Most requests running at once."""
    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step: the chunk of a long prompt and the mixed step's budget. None is 8192 on CUDA,
    where larger products are faster ones, and 2048 elsewhere."""
    max_model_len: int = 2048
    """Context limit: prompt and output together, tokens."""
    max_queue_len: int | None = None
    """Most requests waiting; None is no limit."""
    overlap: bool | None = None
    """Schedule the next step while the last one runs; None is on where the device runs beside the host (CUDA)."""
    prompts_first: bool | None = None
    """Let requests that decode already wait while a step is full of prompts: more tokens a second, in a less even flow.
    None is on for `LLM` and the commands over it, whose callers wait for the whole, and off for a server."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_queue_len"):
            value = getattr(self, name)
            _check(value is None or value >= 1, name, value, "must be at least 1")

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens`, resolved."""
        return 2048 if self.max_num_batched_tokens is None else self.max_num_batched_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """What is recorded, when, and for which sizes."""

    decode_graph: GraphBackend = GraphBackend.AUTO
    """Execution backend of decode steps."""
    prefill_graph: GraphBackend = GraphBackend.AUTO
    """Execution backend of prefill and mixed steps."""
    capture: CapturePolicy = CapturePolicy.EAGER
    """At start-up, at first use between steps, or never."""
    decode_sizes: tuple[int, ...] | None = None
    """Captured batch sizes; None takes the default list tied to max_num_seqs."""
    prefill_sizes: tuple[int, ...] | None = None
    """Captured token counts; None takes the default list tied to max_num_batched_tokens."""
    poison_outputs: bool = False
    """Overwrite the outputs of a replay when they expire, to make a late reader loud."""

    def __post_init__(self) -> None:
        for name in ("decode_sizes", "prefill_sizes"):
            sizes = getattr(self, name)
            if sizes is not None:
                _check(bool(sizes) and min(sizes) >= 1, name, sizes, "must be positive and not empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """What the engine tells about itself beyond its metrics."""

    trace: str | None = None
    """File for a Chrome / Perfetto trace of steps and request lifetimes, written when the engine closes."""
    log_format: LogFormat = LogFormat.TEXT
    """How the log on stderr is written: text, or json with one object a line."""
    check_graphs: bool = False
    """Run every replayed step eagerly too, with unreadable memory poisoned, and stop at the first difference."""
    nvtx: bool = False
    """Mark schedule, load_batch, execute, sample, capture for a profiler (NVTX on a GPU, torch.profiler elsewhere)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All sections together."""

    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    speculative: SpeculativeConfig | None = None
    """Speculative decoding; None is off."""
    num_threads: int | None = None
    """CPU threads; None takes the physical cores this process may use."""

    def __post_init__(self) -> None:
        threads = self.num_threads
        _check(threads is None or threads >= 1, "num_threads", threads, "must be at least 1")


def _check(is_fine: bool, name: str, value: object, problem: str) -> None:
    if not is_fine:
        raise ConfigError(name, value, problem)
