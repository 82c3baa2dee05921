"""From a loaded model to its runners: what is recorded, with which backend, in which sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from graphrunner.attention.backend import GraphSupport
from graphrunner.attention.registry import create_attention
from graphrunner.config.engine_config import (
    CapturePolicy,
    EngineConfig,
    GraphBackend,
    SchedulerConfig,
)
from graphrunner.core.errors import ConfigError
from graphrunner.core.forward_batch import KVLayer
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.device.device import GraphPool
from graphrunner.device.registry import device_of
from graphrunner.engine.check.graph_check import GraphCheck
from graphrunner.engine.model_runner import ModelRunner
from graphrunner.engine.step_forward import StepForward
from graphrunner.execution.backend import ExecutionBackend
from graphrunner.execution.recording import RecordingBackend
from graphrunner.execution.registry import create_execution_backend
from graphrunner.kvcache.page_allocator import PageAllocator
from graphrunner.kvcache.pool import KVPool
from graphrunner.models.registry import LanguageModel
from graphrunner.runner.base_runner import BaseRunner
from graphrunner.runner.capture_sizes import default_decode_sizes, default_prefill_sizes, sparse_sizes, user_sizes
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
from graphrunner.speculative.draft_controller import MAX_ADAPTIVE_REQS, DraftController, widths_of
from graphrunner.speculative.missed_tokens import MissedTokens
from graphrunner.speculative.proposer import DeviceProposer, Proposer, ProposerContext, TargetNeeds
from graphrunner.speculative.speculation import Speculation
from graphrunner.telemetry.log import get_logger

log = get_logger(__name__)

_COMPILING = (GraphBackend.PIECEWISE, GraphBackend.INDUCTOR)
_MAX_COMPILED_CPU_SIZE = 8
"""Largest batch compiled by default on a CPU, where each size costs seconds; larger batches say NUM_REQS and run."""


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """Builds the runners of one model. Nothing is recorded yet.

    Attributes:
        config, limits: the settings, and the scheduler's section with the model's context limit in it.
        model: loaded, on `device`.
        structured: compiles grammars; None refuses requests that need one.
        eos_token_ids: what min_tokens holds back.
        proposer: makes drafts; None for none.
    """

    config: EngineConfig
    limits: SchedulerConfig
    model: LanguageModel
    device: torch.device
    structured: StructuredOutputCompiler | None
    eos_token_ids: frozenset[int]
    proposer: Proposer | None = None

    def build(self, pool: KVPool, allocator: PageAllocator) -> tuple[ModelRunner, Speculation | None]:
        """Runners over the pages of `pool`, the target's first, then the draft's."""
        page_size, limits = self.config.cache.page_size, self.limits
        max_drafts = num_drafts(self.config)
        target_layers = pool.layers[: len(self.model.kv_spec.layers)]
        num_rows, max_seq_len = limits.max_num_seqs + 1, limits.max_model_len + max_drafts
        table = RequestTable(num_rows, -(-max_seq_len // page_size), self.device, max_drafts)
        sampler = Sampler(self.model.config.vocab_size, num_rows, self.device, self.structured)
        verifier = Verifier(sampler)
        is_invariant = self.config.load.deterministic
        attention = create_attention(self.device, is_batch_invariant=is_invariant)
        needs = self.proposer.needs if self.proposer else TargetNeeds()
        tree = self.config.speculative.draft_tree if self.config.speculative else None
        if tree is not None and is_invariant:
            problem = "must be off with a tree of drafts: its kernels know no trees"
            raise ConfigError("deterministic", is_invariant, problem)
        forward = StepForward(self.model, sampler, verifier, needs, tree=tree, is_batch_invariant=is_invariant)
        context = RunnerContext(
            forward, forward.tail, table, target_layers, attention, self.device, page_size, max_seq_len,
            needs_hidden_states=needs.hidden_states or bool(needs.aux_layers), draft_tree=tree,
        )  # fmt: skip
        account = GraphAccount()
        eager = EagerRunner(context)
        speculation = self._speculation(context, account, sampler, pool.layers)
        if isinstance(self.proposer, DeviceProposer):
            verifier.draft_probs = self.proposer.draft_probs()
        # One pool for all of the target's runners: their steps never run at the same time. The draft's have their own,
        # for they read what the target's left behind.
        graph_pool = device_of(self.device).graph_pool()
        runner = ModelRunner(
            decode_cuda_graph_runner=self._decode_runner(context, account, eager, graph_pool),
            prefill_cuda_graph_runner=self._prefill_runner(context, account, eager, graph_pool),
            eager_runner=eager,
            request_table=table,
            sampler=sampler,
            pooler=Pooler(self.model.final_norm),
            verifier=verifier,
            account=account,
            eos_token_ids=self.eos_token_ids,
            check=self._check(context, account, eager, forward, allocator),
            speculation=speculation,
            verify_runners=self._verify_runners(context, account, speculation, graph_pool),
        )
        return runner, speculation

    def _speculation(
        self, context: RunnerContext, account: GraphAccount, sampler: Sampler, layers: tuple[KVLayer, ...]
    ) -> Speculation | None:
        config, graph = self.config.speculative, self.config.graph
        if config is None or self.proposer is None:
            return None
        sizes = self._verify_sizes()
        num_own = len(context.kv_layers)
        own = replace(context, kv_layers=layers[num_own:])
        self.proposer.bind(
            ProposerContext(
                runner_context=own,
                target_kv_layers=context.kv_layers,
                sampling_rows=sampler.rows,
                pick=sampler.sample_in_graph,
                account=account,
                new_backend=self._uniform_backend,
                sizes=sizes,
                max_drafts=config.num_drafts,
                is_lazy=graph.capture is CapturePolicy.LAZY,
            )
        )
        widths = widths_of(config)
        tree = config.draft_tree
        controller = DraftController(
            widths, sizes, is_adaptive=config.adaptive, disable_at=config.disable_by_batch_size,
            num_levels=None if tree is None else tree.num_levels,
        )  # fmt: skip
        missed = MissedTokens(own) if own.kv_layers else None
        return Speculation(
            config.method, self.proposer, controller, max_drafts=config.num_drafts,
            vocab_size=self.model.config.vocab_size, missed=missed,
        )  # fmt: skip

    def _uniform_backend(self, graph_pool: GraphPool | None = None) -> ExecutionBackend | None:
        """A backend for steps with the same number of tokens in every request; None where graphs are off."""
        graph = self.config.graph
        if graph.capture is CapturePolicy.OFF:
            return None
        return self._backend(graph.decode_graph, GraphSupport.UNIFORM, graph_pool)

    def _verify_runners(
        self,
        context: RunnerContext,
        account: GraphAccount,
        speculation: Speculation | None,
        graph_pool: GraphPool,
    ) -> dict[int, BaseRunner]:
        runners: dict[int, BaseRunner] = {}
        keeper = self.proposer.keeper() if isinstance(self.proposer, DeviceProposer) else None
        for width in speculation.controller.widths if speculation is not None else ():
            backend = self._uniform_backend(graph_pool)
            if backend is not None:
                runners[width] = DecodeCudaGraphRunner(
                    context, backend, account, self._verify_sizes(), variants=self._decode_variants(),
                    query_width=width, keeper=keeper, name=f"verify_{width}",
                    is_lazy=self.config.graph.capture is CapturePolicy.LAZY,
                    is_poisoning=self.config.graph.poison_outputs,
                )  # fmt: skip
        return runners

    def _verify_sizes(self) -> tuple[int, ...]:
        """Batch sizes at which drafts are made and verified: the decode steps', cut where `adaptive` verifies none."""
        config, sizes = self.config.speculative, self._decode_sizes()
        if config is None or not config.adaptive or self.config.graph.decode_sizes:
            return sizes
        return tuple(size for size in sizes if size <= MAX_ADAPTIVE_REQS) or sizes[:1]

    def _check(
        self,
        context: RunnerContext,
        account: GraphAccount,
        eager: EagerRunner,
        forward: StepForward,
        allocator: PageAllocator,
    ) -> GraphCheck | None:
        if not self.config.telemetry.check_graphs:
            return None
        if context.draft_tree is not None:
            problem = "must be off with a tree of drafts: a step that moves KV cannot be run twice"
            raise ConfigError("check_graphs", True, problem)
        return GraphCheck(
            context,
            eager,
            account,
            model=self.model,
            pick=forward.pick,
            free_pages=lambda: allocator.free_pages,
        )

    def _decode_runner(
        self, context: RunnerContext, account: GraphAccount, eager: BaseRunner, graph_pool: GraphPool
    ) -> BaseRunner:
        graph = self.config.graph
        backend = self._backend(graph.decode_graph, GraphSupport.DECODE, graph_pool)
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
        if self.device.type == "cuda" and self.config.graph.decode_graph is GraphBackend.PIECEWISE:
            return (ForwardVariant.LOGITS,)  # tokens are picked after it, by kernels that cannot be traced
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
        sizes = default_decode_sizes(limit if is_cheap else min(limit, _MAX_COMPILED_CPU_SIZE))
        if graph.decode_graph in _COMPILING:
            sizes = sparse_sizes(sizes)
        if is_cheap and sizes[-1] < limit:
            text = "decode graphs end at %d requests, max_num_seqs is %d: larger steps run eagerly (set decode_sizes)"
            log.warning(text, sizes[-1], limit)
        return sizes

    def _backend(
        self, wanted: GraphBackend, needed: GraphSupport, graph_pool: GraphPool | None
    ) -> ExecutionBackend | None:
        """The backend of a phase; None when graphs are off or the attention cannot be recorded."""
        is_auto = wanted is GraphBackend.AUTO
        if is_auto:
            wanted = GraphBackend.FULL if self.device.type == "cuda" else GraphBackend.RECORDING
            support = min(create_attention(self.device).graph_support, self.model.graph_support)
            if support < needed:
                return None
        if wanted is GraphBackend.OFF:
            return None
        if wanted is GraphBackend.RECORDING:
            return RecordingBackend(has_warm_up=not is_auto)
        return create_execution_backend(wanted, self.device, pool=graph_pool)

    def _prefill_runner(
        self, context: RunnerContext, account: GraphAccount, eager: BaseRunner, graph_pool: GraphPool
    ) -> BaseRunner:
        graph, limits = self.config.graph, self.limits
        backend = self._backend(graph.prefill_graph, GraphSupport.ALWAYS, graph_pool)
        if graph.prefill_graph is GraphBackend.AUTO and self.device.type == "cpu":
            backend = None  # a replay on the CPU calls the same operators, so padding a prompt would only cost
        if backend is None or graph.capture is CapturePolicy.OFF:
            return eager
        limit = limits.token_budget
        sizes = user_sizes(graph.prefill_sizes, limit) if graph.prefill_sizes else default_prefill_sizes(limit)
        if backend.is_traced and not graph.prefill_sizes:
            sizes = sparse_sizes(sizes)
        is_lazy = graph.capture is CapturePolicy.LAZY
        if graph.prefill_graph is GraphBackend.INDUCTOR:
            return CPUGraphRunner(
                context, backend, account, (), prefill_sizes=sizes, max_reqs=limits.max_num_seqs, is_lazy=is_lazy
            )
        return PrefillCudaGraphRunner(context, backend, account, sizes, max_reqs=limits.max_num_seqs, is_lazy=is_lazy)


def num_drafts(config: EngineConfig) -> int:
    """Most draft tokens of a row and step."""
    return 0 if config.speculative is None else config.speculative.num_drafts
