"""The only file that wires: from a configuration to a running engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch

from graphrunner.attention.backend import AttentionBackend, GraphSupport
from graphrunner.attention.registry import create_attention
from graphrunner.config.engine_config import (
    CapturePolicy,
    EngineConfig,
    GraphBackend,
    KVCacheDtype,
    LoadConfig,
    SchedulerConfig,
)
from graphrunner.config.env import log_level
from graphrunner.config.model_config import ModelConfig
from graphrunner.config.quantization import Quantization
from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.errors import ConfigError
from graphrunner.core.forward_batch import KVLayer
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.engine.check.graph_check import GraphCheck
from graphrunner.engine.determinism import require_deterministic
from graphrunner.engine.engine_core import EngineCore
from graphrunner.engine.llm_engine import LLMEngine
from graphrunner.engine.memory_plan import plan_num_pages
from graphrunner.engine.model_runner import ModelRunner
from graphrunner.engine.observation import Observation
from graphrunner.engine.output_processor import OutputProcessor
from graphrunner.engine.step_forward import StepForward
from graphrunner.engine.token_engine import TokenEngine
from graphrunner.engine.tokenizer import load_tokenizer, source_of
from graphrunner.execution.backend import ExecutionBackend
from graphrunner.execution.recording import RecordingBackend
from graphrunner.execution.registry import create_execution_backend
from graphrunner.kvcache.page_allocator import PageAllocator
from graphrunner.kvcache.pool import KVPool, KVSpec
from graphrunner.kvcache.prefix_cache import NoPrefixCache
from graphrunner.kvcache.radix_cache import RadixCache
from graphrunner.models.options import ModelOptions
from graphrunner.models.registry import LanguageModel, ModelImpl, load_model
from graphrunner.runner.base_runner import BaseRunner
from graphrunner.runner.capture_sizes import default_decode_sizes, default_prefill_sizes, user_sizes
from graphrunner.runner.cpu_graph_runner import CPUGraphRunner
from graphrunner.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from graphrunner.runner.eager_runner import EagerRunner
from graphrunner.runner.graph_account import GraphAccount
from graphrunner.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
from graphrunner.runner.request_table import RequestTable
from graphrunner.runner.runner_context import RunnerContext
from graphrunner.sampling.pooler import Pooler
from graphrunner.sampling.sampler import Sampler
from graphrunner.sampling.structured_output import StructuredOutputCompiler
from graphrunner.sampling.verifier import Verifier
from graphrunner.scheduler.scheduler import Scheduler
from graphrunner.speculative.draft_controller import DraftController, widths_for
from graphrunner.speculative.proposer import DeviceProposer, Proposer, ProposerContext, Target, TargetNeeds
from graphrunner.speculative.registry import create_proposer
from graphrunner.speculative.speculation import Speculation
from graphrunner.telemetry.log import setup_logging
from graphrunner.tokenizer.tokenizer import Tokenizer
from graphrunner.weights.progress import progress_bar
from graphrunner.weights.source import ModelSource, load_model_config

_MAX_COMPILED_CPU_SIZE = 8
"""Largest batch compiled by default on a CPU, where each size costs seconds; larger batches say NUM_REQS and run."""

_CUDA_TOKEN_BUDGET = 8192
"""Tokens a step at most, by default: a prompt's products are then large enough for the card's full rate."""
_FIRST_CAPABILITY_WITH_FP8 = (8, 9)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_engine(config: EngineConfig) -> LLMEngine:
    """Load the model, size the KV pool, record graphs, and join everything.

    Raises:
        ConfigError, ModelLoadError: one line that names the setting or the file.
    """
    setup_logging(log_level(), config.telemetry.log_format)
    device = _device(config.load.device)
    seen = Observation(config.telemetry, device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    elif device.type == "cpu":
        torch.set_num_threads(_num_physical_cores())
    source = source_of(config.load)
    model_config = load_model_config(source)
    limits = _limits(config.scheduler, model_config, device)
    if config.speculative is not None and limits.overlap:
        raise ConfigError("overlap", limits.overlap, "must be off with speculative_config: drafts follow known tokens")
    # Padding of a verify step stands at positions past the context limit.
    num_positions = limits.max_model_len + _num_drafts(config)
    model = _load(config.load, source, model_config, device, num_positions)
    require_deterministic(config, model, device)
    tokenizer = load_tokenizer(config.load, source)
    eos = frozenset(model_config.eos_token_ids) | frozenset(tokenizer.eos_token_ids if tokenizer else ())
    structured = _structured(tokenizer, model_config.vocab_size, eos)
    proposer = None
    if config.speculative is not None:
        target = Target(model, source, limits.max_model_len, limits.max_num_seqs, config.load.seed)
        proposer = create_proposer(config.speculative, target)
    parts = _Parts(config, limits, model_config, model, device, structured, proposer)
    model_runner, scheduler, speculation = parts.build(eos)
    core = EngineCore(
        scheduler,
        model_runner,
        is_overlapped=_is_overlapped(limits, device, config.speculative),
        on_step=seen.on_step,
        speculation=speculation,
    )
    token_engine = TokenEngine(
        core,
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


@dataclass(frozen=True, slots=True)
class _Parts:
    """Builds what depends on the loaded model."""

    config: EngineConfig
    limits: SchedulerConfig
    model_config: ModelConfig
    model: LanguageModel
    device: torch.device
    structured: StructuredOutputCompiler | None
    proposer: Proposer | None = None

    def build(self, eos: frozenset[int]) -> tuple[ModelRunner, Scheduler, Speculation | None]:
        cache, limits = self.config.cache, self.limits
        dtype = _cache_dtype(cache.kv_cache_dtype, self.model.options.dtype, self.device)
        max_drafts = _num_drafts(self.config)
        # The draft's layers live in the same pool, under the same page ids: one plan, one allocation.
        kv_spec = KVSpec(self.model.kv_spec.layers + (self.proposer.kv_spec.layers if self.proposer else ()))
        bytes_per_page = kv_spec.bytes_per_page(cache.page_size, dtype)
        num_pages = plan_num_pages(cache, limits, bytes_per_page, self.device, self._reserved_bytes())
        pool = KVPool(kv_spec, num_pages, cache.page_size, dtype, self.device)
        target_layers = pool.layers[: len(self.model.kv_spec.layers)]
        allocator = PageAllocator(num_pages)
        prefix = RadixCache(allocator, cache.page_size) if cache.enable_prefix_caching else NoPrefixCache(allocator)
        num_rows = limits.max_num_seqs + 1
        max_seq_len = limits.max_model_len + max_drafts
        table = RequestTable(num_rows, -(-max_seq_len // cache.page_size), self.device, max_drafts)
        sampler = Sampler(self.model_config.vocab_size, num_rows, self.device, self.structured)
        verifier = Verifier(sampler)
        is_invariant = self.config.load.deterministic
        attention = create_attention(self.device, is_batch_invariant=is_invariant)
        needs = self.proposer.needs if self.proposer else TargetNeeds()
        forward = StepForward(self.model, sampler, verifier, needs, is_batch_invariant=is_invariant)
        context = RunnerContext(
            forward, forward.tail, table, target_layers, attention, self.device, cache.page_size, max_seq_len,
            needs_hidden_states=needs.hidden_states or bool(needs.aux_layers),
        )  # fmt: skip
        account = GraphAccount()
        eager = EagerRunner(context)
        speculation = self._speculation(context, account, sampler, pool.layers)
        if isinstance(self.proposer, DeviceProposer):
            verifier.draft_probs = self.proposer.draft_probs()
        scheduler = Scheduler(
            limits, allocator, prefix, page_size=cache.page_size, max_model_len=limits.max_model_len,
            max_pages_per_row=-(-limits.max_model_len // cache.page_size), draft_planner=speculation,
        )  # fmt: skip
        runner = ModelRunner(
            decode_cuda_graph_runner=self._decode_runner(context, account, eager, attention),
            prefill_cuda_graph_runner=self._prefill_runner(context, account, eager, attention),
            eager_runner=eager,
            request_table=table,
            sampler=sampler,
            pooler=Pooler(self.model.final_norm),
            verifier=verifier,
            account=account,
            eos_token_ids=eos,
            check=self._check(context, account, eager, sampler, allocator),
            speculation=speculation,
            verify_runners=self._verify_runners(context, account, attention, speculation),
        )
        _capture(runner)
        return runner, scheduler, speculation

    def _speculation(
        self, context: RunnerContext, account: GraphAccount, sampler: Sampler, layers: tuple[KVLayer, ...]
    ) -> Speculation | None:
        config, graph = self.config.speculative, self.config.graph
        if config is None or self.proposer is None:
            return None
        sizes = self._decode_sizes()
        num_own = len(context.kv_layers)
        self.proposer.bind(
            ProposerContext(
                runner_context=replace(context, kv_layers=layers[num_own:]),
                target_kv_layers=context.kv_layers,
                sampling_rows=sampler.rows,
                pick=sampler.sample_in_graph,
                account=account,
                new_backend=self._uniform_backend,
                sizes=sizes,
                max_drafts=config.num_speculative_tokens,
                is_lazy=graph.capture is CapturePolicy.LAZY,
            )
        )
        widths = widths_for(config.num_speculative_tokens, is_adaptive=config.adaptive)
        controller = DraftController(
            widths, sizes, is_adaptive=config.adaptive, disable_at=config.disable_by_batch_size
        )  # fmt: skip
        return Speculation(self.proposer, controller, config.num_speculative_tokens)

    def _uniform_backend(self) -> ExecutionBackend | None:
        """A backend for steps with the same number of tokens in every request; None where graphs are off."""
        graph = self.config.graph
        if graph.capture is CapturePolicy.OFF:
            return None
        support = min(create_attention(self.device).graph_support, self.model.graph_support)
        return _execution_backend(graph.decode_graph, self.device, support, GraphSupport.UNIFORM)

    def _verify_runners(
        self,
        context: RunnerContext,
        account: GraphAccount,
        attention: AttentionBackend,
        speculation: Speculation | None,
    ) -> dict[int, BaseRunner]:
        runners: dict[int, BaseRunner] = {}
        for width in speculation.controller.widths if speculation is not None else ():
            backend = self._uniform_backend()
            if backend is not None:
                runners[width] = DecodeCudaGraphRunner(
                    context, backend, account, self._decode_sizes(), variants=self._decode_variants(),
                    query_width=width, name=f"verify_{width}", is_lazy=self.config.graph.capture is CapturePolicy.LAZY,
                    is_poisoning=self.config.graph.poison_outputs,
                )  # fmt: skip
        return runners

    def _check(
        self,
        context: RunnerContext,
        account: GraphAccount,
        eager: EagerRunner,
        sampler: Sampler,
        allocator: PageAllocator,
    ) -> GraphCheck | None:
        if not self.config.telemetry.check_graphs:
            return None
        pick = sampler.sample_in_graph
        return GraphCheck(context, eager, account, model=self.model, pick=pick, free_pages=lambda: allocator.free_pages)

    def _reserved_bytes(self) -> int:
        """Device memory for graphs and activations, from shapes: hidden rows, logits, attention partials."""
        if self.device.type != "cuda":
            return 0
        config, limits = self.model_config, self.limits
        widest = max(config.intermediate_size * 3, config.hidden_size * 8)
        activations = limits.token_budget * widest * 2 * 4
        logits = limits.max_num_seqs * config.vocab_size * 4 * 4
        return activations + logits + (1 << 30)

    def _decode_runner(
        self, context: RunnerContext, account: GraphAccount, eager: BaseRunner, attention: AttentionBackend
    ) -> BaseRunner:
        graph = self.config.graph
        support = min(attention.graph_support, self.model.graph_support)
        backend = _execution_backend(graph.decode_graph, self.device, support, GraphSupport.DECODE)
        if backend is None or graph.capture is CapturePolicy.OFF:
            return eager
        sizes = self._decode_sizes()
        variants = self._decode_variants()
        is_lazy = graph.capture is CapturePolicy.LAZY
        if graph.decode_graph is GraphBackend.INDUCTOR:
            limit = self.limits.max_num_seqs
            return CPUGraphRunner(context, backend, account, sizes, max_reqs=limit, variants=variants, is_lazy=is_lazy)
        return DecodeCudaGraphRunner(
            context, backend, account, sizes, variants=variants, is_lazy=is_lazy, is_poisoning=graph.poison_outputs
        )

    def _decode_variants(self) -> tuple[ForwardVariant, ...]:
        """What is recorded of decode and verify steps."""
        if self.device.type == "cpu" and self.config.graph.decode_graph not in (
            GraphBackend.AUTO,
            GraphBackend.RECORDING,
        ):
            # Filters look at their rows' parameters on the host there, which cannot be traced: sampled after the graph.
            return ForwardVariant.GREEDY, ForwardVariant.LOGITS
        return tuple(variant for variant in ForwardVariant if variant is not ForwardVariant.HIDDEN)

    def _decode_sizes(self) -> tuple[int, ...]:
        """The user's list as given; else the default one, short where a size costs seconds to record."""
        graph, limit = self.config.graph, self.limits.max_num_seqs
        if graph.decode_sizes:
            return user_sizes(graph.decode_sizes, limit)
        is_cheap = self.device.type == "cuda" or graph.decode_graph in (GraphBackend.AUTO, GraphBackend.RECORDING)
        return default_decode_sizes(limit if is_cheap else min(limit, _MAX_COMPILED_CPU_SIZE))

    def _prefill_runner(
        self, context: RunnerContext, account: GraphAccount, eager: BaseRunner, attention: AttentionBackend
    ) -> BaseRunner:
        graph, limits = self.config.graph, self.limits
        support = min(attention.graph_support, self.model.graph_support)
        backend = _execution_backend(graph.prefill_graph, self.device, support, GraphSupport.ALWAYS)
        if graph.prefill_graph is GraphBackend.AUTO and self.device.type == "cpu":
            backend = None  # a replay on the CPU calls the same operators, so padding a prompt would only cost
        if backend is None or graph.capture is CapturePolicy.OFF:
            return eager
        limit = limits.token_budget
        sizes = user_sizes(graph.prefill_sizes, limit) if graph.prefill_sizes else default_prefill_sizes(limit)
        is_lazy = graph.capture is CapturePolicy.LAZY
        if graph.prefill_graph is GraphBackend.INDUCTOR:
            return CPUGraphRunner(
                context, backend, account, (), prefill_sizes=sizes, max_reqs=limits.max_num_seqs, is_lazy=is_lazy
            )
        return PrefillCudaGraphRunner(context, backend, account, sizes, max_reqs=limits.max_num_seqs, is_lazy=is_lazy)


def _is_overlapped(limits: SchedulerConfig, device: torch.device, speculative: SpeculativeConfig | None) -> bool:
    if speculative is not None:
        return False  # drafts are planned for rows whose tokens are all known
    return device.type == "cuda" if limits.overlap is None else limits.overlap


def _execution_backend(
    wanted: GraphBackend, device: torch.device, support: GraphSupport, needed: GraphSupport
) -> ExecutionBackend | None:
    """The backend of a phase; None when graphs are off or the attention cannot be recorded."""
    is_auto = wanted is GraphBackend.AUTO
    if is_auto:
        wanted = GraphBackend.FULL if device.type == "cuda" else GraphBackend.RECORDING
        if support < needed:
            return None
    if wanted is GraphBackend.OFF:
        return None
    if wanted is GraphBackend.RECORDING:
        return RecordingBackend(has_warm_up=not is_auto)
    return create_execution_backend(wanted, device)


def _num_drafts(config: EngineConfig) -> int:
    """Most draft tokens of a row and step."""
    return 0 if config.speculative is None else config.speculative.num_speculative_tokens


def _capture(runner: ModelRunner) -> None:
    """Record under a progress bar on stderr, when that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(transient=True, disable=not console.is_terminal, console=console) as progress:
        task = progress.add_task("capturing", total=None)
        runner.capture(lambda name, done, total: progress.update(task, description=name, completed=done, total=total))


def _cache_dtype(wanted: KVCacheDtype, model_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of keys and values in the pages."""
    if wanted is KVCacheDtype.AUTO:
        return model_dtype
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY_WITH_FP8:
        raise ConfigError("kv_cache_dtype", wanted.value, "needs a card of compute capability 8.9 or newer")
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
