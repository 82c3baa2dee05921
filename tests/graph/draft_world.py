"""A proposer on hidden states, bound by hand, with rows in the middle of their sequences and NaN all around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from fakes.world import MAX_SEQ_LEN, PAGE_SIZE

from graphrunner.attention.torch_attention import TorchAttention
from graphrunner.config.engine_config import GraphBackend
from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.forward_batch import KVLayer
from graphrunner.core.scheduled_batch import SamplingNeed, ScheduledBatch
from graphrunner.core.shape_key import ForwardMode
from graphrunner.execution.registry import create_execution_backend
from graphrunner.models.causal_lm import CausalLM
from graphrunner.runner.base_draft_runner import BaseDraftRunner
from graphrunner.runner.graph_account import GraphAccount
from graphrunner.runner.request_table import RequestTable
from graphrunner.runner.runner_context import RunnerContext
from graphrunner.sampling.rows import SamplingRows
from graphrunner.sampling.sampler import Sampler
from graphrunner.speculative.proposer import DeviceProposer, DraftRound, ProposerContext, Target
from graphrunner.speculative.registry import create_proposer
from graphrunner.weights.source import ModelSource, SourceKind

MAX_REQS = 7
NUM_DRAFTS = 3
WIDTH = NUM_DRAFTS + 1


class DraftWorld:
    """Args: target and draft folder; sizes to record. Rows 1 to MAX_REQS have 6, 9, 12, ... tokens computed."""

    def __init__(
        self,
        method: str,
        model: CausalLM,
        folder: Path,
        *,
        backend: GraphBackend | None = GraphBackend.RECORDING,
        sizes: Sequence[int] = (1, 2, 4),
        is_lazy: bool = False,
        num_drafts: int = NUM_DRAFTS,
        tree: str | None = None,
        topk: int | None = None,
    ) -> None:
        device = model.options.device
        config = SpeculativeConfig(
            method=method,
            model=str(folder),
            num_speculative_tokens=num_drafts,
            adaptive=False,
            speculative_token_tree=tree,
            speculative_eagle_topk=topk,
            speculative_num_steps=None if topk is None else 3,
        )
        source = ModelSource("target", SourceKind.DUMMY, folder)
        proposer = create_proposer(config, Target(model, source, MAX_SEQ_LEN, MAX_REQS))
        assert isinstance(proposer, DeviceProposer)
        self.proposer, self.model, self.num_drafts, self.device = proposer, model, num_drafts, device
        self.table = RequestTable(MAX_REQS + 1, MAX_SEQ_LEN // PAGE_SIZE, device, num_drafts)
        rng = torch.Generator().manual_seed(6)
        num_pages = 1 + MAX_REQS * MAX_SEQ_LEN // PAGE_SIZE
        order = 1 + torch.randperm(num_pages - 1, generator=rng)
        own, target = (
            tuple(_nan_layer(num_pages, spec.num_kv_heads, spec.head_dim, device) for spec in one.layers)
            for one in (proposer.kv_spec, model.kv_spec)
        )
        self.own_layers, self.account = own, GraphAccount()
        for row in range(1, MAX_REQS + 1):
            length = 3 + 3 * row
            count = -(-(length + 2 * WIDTH) // PAGE_SIZE)
            pages = order[row * 9 : row * 9 + count]
            self.table.page_table[row, :count] = pages.int().to(device)
            self.table.num_computed[row] = length
            self.table.last_token[row] = 5 + row
            for layer in (*own, *target):
                for position in range(length):
                    page, offset = int(pages[position // PAGE_SIZE]), position % PAGE_SIZE
                    for half in (layer.k, layer.v):
                        half[page, offset] = torch.randn(half.shape[2:], generator=rng).to(device)
        rows = SamplingRows(MAX_REQS + 1, device)
        rows.temperature[1::2], rows.seed[:] = 0.8, torch.arange(MAX_REQS + 1, device=device)
        context = RunnerContext(
            lambda batch, variant: None, lambda hidden: None, self.table, own, TorchAttention(), device, PAGE_SIZE,
            MAX_SEQ_LEN,
        )  # fmt: skip
        make = (lambda: None) if backend is None else (lambda: create_execution_backend(backend, device))
        proposer.bind(
            ProposerContext(
                context, target, rows, Sampler(model.config.vocab_size, MAX_REQS + 1, device, None).sample_in_graph,
                self.account, make, tuple(sizes), num_drafts, is_lazy=is_lazy,
            )
        )  # fmt: skip

    def capture(self) -> DraftWorld:
        """Record every list."""
        for runner in self.proposer.runners():
            runner.capture()
        return self

    def runners(self) -> list[BaseDraftRunner]:
        """The proposer's runners."""
        return [runner for runner in self.proposer.runners() if isinstance(runner, BaseDraftRunner)]

    def round_of(
        self, rows: Sequence[int], *, width: int = WIDTH, need: SamplingNeed = SamplingNeed.GREEDY
    ) -> DraftRound:
        """The round after a step of these rows: always the same one for a row, whoever is beside it."""
        counts = [1 + row % width for row in rows]
        hidden_size = self.model.config.hidden_size
        hidden, ids = [], []
        for row, count in zip(rows, counts, strict=True):
            rng = torch.Generator().manual_seed(100 + row)
            states = torch.randn(width, 2 * hidden_size, generator=rng)
            states[count:] = float("nan")  # what was rejected may be anything
            hidden.append(states)
            picked = torch.randint(3, self.model.config.vocab_size, (width,), generator=rng, dtype=torch.int32)
            picked[count:] = -1
            ids.append(picked)
        batch = ScheduledBatch(
            step_id=0,
            mode=ForwardMode.VERIFY if width > 1 else ForwardMode.DECODE,
            request_ids=tuple(f"r{row}" for row in rows),
            rows=tuple(rows),
            cached_lens=tuple(3 + 3 * row - count for row, count in zip(rows, counts, strict=True)),
            query_lens=(width,) * len(rows),
            input_ids=(),
            samples=(True,) * len(rows),
            sampling_need=need,
        )
        states = torch.cat(hidden).to(self.device)
        num_new = torch.tensor(counts, dtype=torch.int32, device=self.device)
        return DraftRound(
            batch, None, self.num_drafts, torch.stack(ids).to(self.device), num_new,
            hidden_states=states[:, :hidden_size].contiguous(), aux_hidden_states=states,
        )  # fmt: skip

    @torch.inference_mode()
    def propose(self, rows: Sequence[int], *, poison: int | None = None, **options) -> list[list[int]]:
        """The drafts of a round, by row."""
        for runner in self.runners():
            runner.capture_pending()
            if poison is not None:
                runner.poison(poison)
        self.table.draft_tokens.fill_(-7)
        self.proposer.propose(self.round_of(rows, **options))
        return self.table.draft_tokens[list(rows)].tolist()

    def snapshot(self) -> list[torch.Tensor]:
        """The draft's own KV."""
        return [half.clone() for layer in self.own_layers for half in (layer.k, layer.v)]


def prompt_batch(round_: DraftRound) -> ScheduledBatch:
    """The same rows as a prompt step, which no draft runner takes."""
    return replace(round_.batch, mode=ForwardMode.PREFILL)


def _nan_layer(num_pages: int, num_heads: int, head_dim: int, device: torch.device) -> KVLayer:
    return KVLayer(
        *(torch.full((num_pages, PAGE_SIZE, num_heads, head_dim), float("nan"), device=device) for _ in range(2))
    )
