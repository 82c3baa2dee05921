"""A separate, smaller model of the same vocabulary, which writes on from the target's tokens with a KV of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from graphrunner.config.quantization import Quantization
from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.active_batch import active_batch
from graphrunner.core.errors import ConfigError
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.shape_key import ForwardMode, ForwardVariant
from graphrunner.device.transfer import to_device
from graphrunner.kernels.tracing import is_tracing
from graphrunner.models.registry import LanguageModel, load_model
from graphrunner.runner.base_draft_runner import draft_batch
from graphrunner.runner.base_graph_runner import BaseGraphRunner
from graphrunner.runner.draft_model_cuda_graph_runner import DraftModelCudaGraphRunner
from graphrunner.runner.prepared import with_metadata
from graphrunner.runner.round_inputs import NewestInputs, newest_read
from graphrunner.sampling.pick import pick_greedy, pick_random
from graphrunner.speculative.draft_controller import widths_for
from graphrunner.speculative.draft_runners import RunnerParts
from graphrunner.speculative.proposer import DeviceProposer, DraftRound, ProposerContext, Target
from graphrunner.weights.source import LoadFormat, SourceKind, load_model_config, resolve_source


def create_proposer(config: SpeculativeConfig, target: Target) -> DraftModelProposer:
    """See `registry.PROPOSERS`.

    Raises:
        ConfigError: no draft is named, or its vocabulary is not the target's.
    """
    if config.model is None:
        raise ConfigError(
            "speculative_config.model", None, "method draft_model needs a model: a folder, file or hub id"
        )
    is_dummy = target.source.kind is SourceKind.DUMMY
    source = resolve_source(config.model, LoadFormat.DUMMY if is_dummy else LoadFormat.AUTO)
    model_config = load_model_config(source)
    own, wanted = model_config.vocab_size, target.model.config.vocab_size
    if own != wanted:
        problem = f"has {own} tokens and the target {wanted}: a draft must share the target's vocabulary"
        raise ConfigError("speculative_config.model", config.model, problem)
    options = replace(target.model.options, quantization=Quantization.NONE)
    model = load_model(source, model_config, options, seed=target.seed)
    counts = [width - 1 for width in widths_for(config.num_drafts, is_adaptive=config.adaptive)]
    return DraftModelProposer(model, counts)


class DraftModelProposer(DeviceProposer):
    """One recording a round; prompts go through the draft as they went through the target.

    Args:
        model: the draft.
        counts: numbers of drafts to record, rising.
    """

    def __init__(self, model: LanguageModel, counts: Sequence[int]) -> None:
        self.kv_spec = model.kv_spec
        self.model = model
        self.counts = tuple(counts)

    def bind(self, context: ProposerContext) -> None:
        """See `Proposer.bind`."""
        self._context = context
        parts = RunnerParts(context, self.model.config.vocab_size - 1)
        self._inputs = NewestInputs(parts.max_reqs, context.runner_context.device)
        self._runners = {
            count: DraftModelCudaGraphRunner(parts.of_runner(), step=self._step, inputs=self._inputs, num_drafts=count)
            for count in self.counts
        }
        self._is_recorded = parts.is_recorded

    def keeper(self) -> NewestInputs:
        """See `DeviceProposer.keeper`."""
        return self._inputs

    def modules(self) -> Sequence[nn.Module]:
        """See `Proposer.modules`."""
        assert isinstance(self.model, nn.Module)
        return (self.model,)

    def runners(self) -> Sequence[BaseGraphRunner]:
        """See `Proposer.runners`."""
        return tuple(self._runners.values()) if self._is_recorded else ()

    def propose(self, round_: DraftRound) -> None:
        """See `DeviceProposer.propose`."""
        step, views = round_.batch, round_.forward_batch
        if step.mode not in (ForwardMode.DECODE, ForwardMode.VERIFY):
            own = with_metadata(replace(views, kv_layers=self._context.runner_context.kv_layers))
            with active_batch(own):
                self.model(own, only_logits_rows=True)
        if round_.num_drafts and any(step.samples):
            runner = next(runner for count, runner in self._runners.items() if count >= round_.num_drafts)
            if not self._inputs.has_kept(round_.num_new):
                self._inputs.take(_before_last(round_))
            runner.run(draft_batch(step))

    def _step(self, batch: ForwardBatch, variant: ForwardVariant) -> torch.Tensor:
        """One forward and the token after each request's last. In graph."""
        with active_batch(batch):
            hidden = self.model(batch)
        if batch.num_tokens > batch.num_reqs:
            hidden = hidden.index_select(0, batch.logits_indices)
        if variant is ForwardVariant.GREEDY:
            token_ids = self.model.greedy_tokens(hidden)
            return pick_greedy(self.model.logits(hidden)) if token_ids is None else token_ids
        logits = self.model.logits(hidden)
        # A request's drafts are drawn with the very noise that the target draws the same places with.
        # A trace is refused there: the filters, as operators, are minutes of compilation.
        if logits.is_cuda or is_tracing():
            return self._context.pick(logits, batch.request_rows, batch.seq_lens, variant)
        return pick_random(logits, self._context.sampling_rows.gather(batch.request_rows, batch.seq_lens))


def _before_last(round_: DraftRound) -> torch.Tensor:
    """The token before the newest one of each row that got one: the last that the target read of what stands."""
    step, views = round_.batch, round_.forward_batch
    if step.mode is ForwardMode.DECODE:
        return views.input_ids[: step.num_reqs]
    if step.mode is ForwardMode.VERIFY:
        return newest_read(views.input_ids, round_.num_new, step.max_query_len)
    chosen = torch.tensor([index for index, samples in enumerate(step.samples) if samples], dtype=torch.int64)
    ends = views.logits_indices.index_select(0, to_device(chosen, views.input_ids.device))
    return views.input_ids.index_select(0, ends)
