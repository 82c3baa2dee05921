"""The only file that wires: from a configuration to a running engine."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch

from graphrunner.config.engine_config import CacheConfig, EngineConfig, KVCacheDtype, LoadConfig, SchedulerConfig
from graphrunner.config.env import log_level
from graphrunner.config.model_config import ModelConfig
from graphrunner.config.quantization import Quantization
from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.errors import ConfigError
from graphrunner.core.startup_report import StartupReport
from graphrunner.device.registry import device_of
from graphrunner.engine.build_runners import RunnerParts, num_drafts
from graphrunner.engine.determinism import require_deterministic
from graphrunner.engine.engine_core import EngineCore, StepOrder
from graphrunner.engine.llm_engine import LLMEngine
from graphrunner.engine.memory_plan import (
    DeviceMemory,
    guessed_step_bytes,
    page_capacity,
    plan_device_pages,
    plan_host_pages,
)
from graphrunner.engine.observation import Observation
from graphrunner.engine.output_processor import OutputProcessor
from graphrunner.engine.residency import Residency
from graphrunner.engine.token_engine import TokenEngine
from graphrunner.engine.tokenizer import load_tokenizer, source_of
from graphrunner.kernels.triton.compile_ahead import KernelCompiler, start_kernel_compiler
from graphrunner.kernels.triton.known_kernels import KnownKernels
from graphrunner.kvcache.page_allocator import PageAllocator
from graphrunner.kvcache.pool import KVPool, KVSpec
from graphrunner.kvcache.prefix_cache import NoPrefixCache
from graphrunner.kvcache.radix_cache import RadixCache
from graphrunner.models.options import ModelOptions
from graphrunner.models.registry import LanguageModel, ModelImpl, load_model, reload_weights
from graphrunner.sampling.structured_output import StructuredOutputCompiler
from graphrunner.scheduler.scheduler import Scheduler
from graphrunner.speculative.proposer import Proposer, Target
from graphrunner.speculative.registry import create_proposer, settled
from graphrunner.speculative.speculation import Speculation
from graphrunner.telemetry.log import get_logger, setup_logging
from graphrunner.telemetry.startup import StartupClock
from graphrunner.tokenizer.tokenizer import Tokenizer
from graphrunner.weights.offload import ModelMemory
from graphrunner.weights.progress import progress_bar
from graphrunner.weights.shapes import num_parameters
from graphrunner.weights.source import ModelSource, load_model_config

_CUDA_TOKEN_BUDGET = 8192
"""Tokens a step at most, by default: a prompt's products are then large enough for the card's full rate."""
_LOG = get_logger(__name__)

_FIRST_CAPABILITY_WITH_FP8 = (8, 9)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_engine(config: EngineConfig) -> LLMEngine:
    """Load the model, size the KV pool, record graphs, and join everything.

    Raises:
        ConfigError, ModelLoadError: one line that names the setting or the file.
    """
    clock = StartupClock()
    setup_logging(log_level(), config.telemetry.log_format)
    device = _device(config.load.device)
    compiler = _kernel_compiler(device)
    try:
        return _build(config, device, clock, compiler)
    finally:
        if compiler is not None:
            compiler.close()


def _build(
    config: EngineConfig, device: torch.device, clock: StartupClock, compiler: KernelCompiler | None
) -> LLMEngine:
    source = source_of(config.load)
    if config.speculative is not None:
        config = replace(config, speculative=settled(config.speculative, source))
    model_config = load_model_config(source)
    clock.lap("configuration")
    device_of(device).trim()
    clock.measure(device_of(device).used_bytes)
    seen = Observation(config.telemetry, device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    elif device.type == "cpu":
        torch.set_num_threads(_num_physical_cores())
    limits = _limits(config.scheduler, model_config, device)
    # Padding of a verify step stands at positions past the context limit.
    num_positions = limits.max_model_len + num_drafts(config)
    clock.lap("device")
    model = _load(config.load, source, model_config, device, num_positions)
    require_deterministic(config, model, device)
    clock.lap("weights", _expected_weight_bytes(model))
    tokenizer = load_tokenizer(config.load, source)
    eos = frozenset(model_config.eos_token_ids) | frozenset(tokenizer.eos_token_ids if tokenizer else ())
    structured = _structured(tokenizer, model_config.vocab_size, eos)
    clock.lap("tokenizer")
    proposer = None
    if config.speculative is not None:
        target = Target(model, source, limits.max_model_len, limits.max_num_seqs, config.load.seed)
        proposer = create_proposer(config.speculative, target)
        clock.lap("draft")
    parts = RunnerParts(config, limits, model, device, structured, eos, proposer)
    core, residency = _core(parts, source, seen, clock, compiler)
    token_engine = TokenEngine(
        core,
        residency,
        startup=_startup_report(clock, config.cache, residency.pool),
        structured=structured,
        step_trace=seen.steps,
        trace_file=seen.trace_file,
        max_model_len=limits.max_model_len,
        vocab_size=model_config.vocab_size,
        eos_token_ids=eos,
        has_tokenizer=tokenizer is not None,
        model_name=source.name,
        seed=config.load.seed,
    )
    processor = OutputProcessor(seen.metrics)
    return LLMEngine(token_engine, tokenizer=tokenizer, processor=processor, metrics=seen.metrics)


def _core(
    parts: RunnerParts,
    source: ModelSource,
    seen: Observation,
    clock: StartupClock,
    compiler: KernelCompiler | None,
) -> tuple[EngineCore, Residency]:
    """What depends on memory, in the order in which it can be measured: runners, graphs, then pages."""
    config, limits, model, proposer = parts.config, parts.limits, parts.model, parts.proposer
    pool = _open_pool(config, limits, model, proposer, parts.device)
    allocator = PageAllocator(pool.num_pages)
    model_runner, speculation = parts.build(pool, allocator)
    clock.lap("runners")
    reload = partial(reload_weights, model, source, seed=config.load.seed)
    memory = ModelMemory(model, proposer.modules() if proposer else ())
    residency = Residency(config.cache, limits, memory, pool, model_runner, reload)
    residency.settle(clock, _rehearsal(parts, compiler, clock))
    allocator.cut(pool.num_pages)
    core = EngineCore(
        _scheduler(config, limits, allocator, speculation),
        model_runner,
        order=_step_order(limits, parts.device, config.speculative),
        on_step=seen.on_step,
        speculation=speculation,
    )
    clock.lap("scheduler")
    return core, residency


def _rehearsal(
    parts: RunnerParts, compiler: KernelCompiler | None, clock: StartupClock
) -> AbstractContextManager[None] | None:
    """What tells of kernels before they are launched; None where they are loaded already, or are met as they come."""
    if compiler is None:
        return None
    from graphrunner.kernels.triton.runtime import device_key

    config, model = parts.config, parts.model
    decides = (
        type(model), model.config, model.options, config.load.deterministic, config.cache, config.graph,
        config.speculative, parts.limits,
    )  # fmt: skip
    known = KnownKernels((device_key(parts.device), *map(repr, decides)))
    if not known.load():
        return compiler.rehearsal(known)
    compiler.close()
    clock.lap("kernels")
    return None


def _open_pool(
    config: EngineConfig, limits: SchedulerConfig, model: LanguageModel, proposer: Proposer | None, device: torch.device
) -> KVPool:
    """The pool before it is known how many pages fit: addresses only, where the device has such a thing."""
    cache = config.cache
    dtype = _cache_dtype(cache.kv_cache_dtype, model.options.dtype, device)
    # The draft's layers live in the same pool, under the same page ids: one plan, one allocation.
    spec = KVSpec(model.kv_spec.layers + (proposer.kv_spec.layers if proposer else ()))
    bytes_per_page = spec.bytes_per_page(cache.page_size, dtype)
    memory = device_of(device)
    if not memory.has_own_memory:
        return KVPool(spec, plan_host_pages(cache, limits, bytes_per_page), cache.page_size, dtype, device)
    capacity = page_capacity(cache, limits, bytes_per_page, memory.total_bytes())
    if not memory.has_virtual_memory:
        sizes = model.config
        step_bytes = guessed_step_bytes(limits, sizes.hidden_size, sizes.intermediate_size, sizes.vocab_size)
        measured = DeviceMemory(memory.total_bytes(), memory.used_bytes(), 0, step_bytes)
        num_pages = plan_device_pages(cache, measured, lambda budget: min(budget // bytes_per_page, capacity))
        return KVPool(spec, num_pages, cache.page_size, dtype, device)
    return KVPool(spec, capacity, cache.page_size, dtype, device, committed_pages=1)


def _expected_weight_bytes(model: LanguageModel) -> int | None:
    """What the checkpoint's shapes say; None where they are not known, or are packed while loading."""
    options = model.options
    is_packed = options.quantization is not Quantization.NONE or model.config.checkpoint_quantization is not None
    if not model.config.is_native or is_packed:
        return None
    return num_parameters(model.config) * (options.weight_dtype or options.dtype).itemsize


def _startup_report(clock: StartupClock, cache: CacheConfig, pool: KVPool) -> StartupReport:
    phases, wall_s = tuple(clock.phases), clock.wall_s
    if not pool.device.has_own_memory:
        return StartupReport(phases, wall_s, num_pages=pool.num_pages)
    limit_bytes = int(pool.device.total_bytes() * cache.gpu_memory_utilization)
    return StartupReport(phases, wall_s, limit_bytes, pool.device.used_bytes(), pool.num_pages)


def _scheduler(
    config: EngineConfig, limits: SchedulerConfig, allocator: PageAllocator, speculation: Speculation | None
) -> Scheduler:
    cache = config.cache
    prefix = RadixCache(allocator, cache.page_size) if cache.enable_prefix_caching else NoPrefixCache(allocator)
    return Scheduler(
        limits, allocator, prefix, page_size=cache.page_size, max_model_len=limits.max_model_len,
        max_pages_per_row=-(-limits.max_model_len // cache.page_size), draft_planner=speculation,
    )  # fmt: skip


def _step_order(limits: SchedulerConfig, device: torch.device, speculative: SpeculativeConfig | None) -> StepOrder:
    if not (device.type == "cuda" if limits.overlap is None else limits.overlap):
        return StepOrder.ONE_BY_ONE
    # Drafts are planned for rows whose tokens are all known.
    return StepOrder.OVERLAPPED if speculative is None else StepOrder.TOLD_BESIDE


def _cache_dtype(wanted: KVCacheDtype, model_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of keys and values in the pages."""
    if wanted is KVCacheDtype.AUTO:
        return model_dtype
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY_WITH_FP8:
        raise ConfigError("kv_cache_dtype", wanted.value, "needs a card of compute capability 8.9 or newer")
    if device.type == "cpu":
        _LOG.warning(
            "kv_cache_dtype=%s: on a CPU an fp8 cache goes through plain torch attention and is slow", wanted.value
        )
    return torch.float8_e4m3fn


def _structured(tokenizer: Tokenizer | None, vocab_size: int, eos: frozenset[int]) -> StructuredOutputCompiler | None:
    """Compiles grammars; None without a tokenizer, whose spellings they are made of."""
    if tokenizer is None:
        return None

    def vocabulary() -> list[bytes]:
        special = tokenizer.special_ids
        return [b"" if i in special else tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]

    return StructuredOutputCompiler(vocabulary, vocab_size, sorted(eos))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError("device", name, "must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "this machine or this build of torch has no CUDA device")
    return torch.device(name)


def _kernel_compiler(device: torch.device) -> KernelCompiler | None:
    """Started before anything else, so that it is ready when the weights are; None where Triton compiles nothing."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return start_kernel_compiler()


def _num_physical_cores() -> int:
    import psutil

    return psutil.cpu_count(logical=False) or 1


def _limits(given: SchedulerConfig, model: ModelConfig, device: torch.device) -> SchedulerConfig:
    """The scheduler's section with the context limit of the model and the device's token budget put in."""
    if given.max_num_batched_tokens is None and device.type == "cuda":
        given = replace(given, max_num_batched_tokens=_CUDA_TOKEN_BUDGET)
    if given.max_model_len > model.max_position:
        if given.max_model_len == SchedulerConfig().max_model_len:
            return replace(given, max_model_len=model.max_position)
        raise ConfigError("max_model_len", given.max_model_len, f"the model's limit is {model.max_position}")
    return given


def _load(
    load: LoadConfig, source: ModelSource, config: ModelConfig, device: torch.device, num_positions: int
) -> LanguageModel:
    if load.dtype != "auto" and load.dtype not in _DTYPES:
        raise ConfigError("dtype", load.dtype, f"must be auto or one of {', '.join(_DTYPES)}")
    is_cpu = device.type == "cpu"
    name = ("float32" if is_cpu else config.dtype) if load.dtype == "auto" else load.dtype
    options = ModelOptions(
        dtype=_DTYPES.get(name, torch.bfloat16),
        device=device,
        num_positions=num_positions,
        quantization=Quantization.from_name(load.quantization),
        trust_remote_code=load.trust_remote_code,
    )
    try:
        impl = ModelImpl(load.model_impl)
    except ValueError:
        raise ConfigError("model_impl", load.model_impl, "must be auto, native or transformers") from None
    with progress_bar("loading", is_shown=sys.stderr.isatty()) as on_progress:
        return load_model(source, config, options, impl=impl, seed=load.seed, on_progress=on_progress)
