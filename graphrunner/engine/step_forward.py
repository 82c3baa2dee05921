"""The closure that runners are given: model, logits and, by variant, sampling."""

from __future__ import annotations

import torch

from graphrunner.core.active_batch import active_batch
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.models.registry import LanguageModel
from graphrunner.sampling.sampler import Sampler


class StepForward:
    """Everything between the gathered inputs and the outputs of one step."""

    def __init__(self, model: LanguageModel, sampler: Sampler) -> None:
        self._model = model
        self._sampler = sampler

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch, variant: ForwardVariant) -> ModelOutput:
        """See `ForwardVariant` for what comes back. In graph: yes."""
        is_hidden = variant is ForwardVariant.HIDDEN
        with active_batch(batch):  # a foreign model's attention can be handed nothing
            hidden = self._model(batch, only_logits_rows=not is_hidden)
        if is_hidden:
            return ModelOutput(hidden_states=hidden)
        if variant is ForwardVariant.GREEDY:
            token_ids = self._model.greedy_tokens(hidden)
            if token_ids is not None:
                return ModelOutput(token_ids=token_ids)
        logits = self._model.logits(hidden)
        if variant is ForwardVariant.LOGITS:
            return ModelOutput(logits=logits)
        return ModelOutput(token_ids=self._sampler.sample_in_graph(logits, batch.request_rows, batch.seq_lens, variant))

    @torch.inference_mode()
    def tail(self, hidden_rows: torch.Tensor) -> ModelOutput:
        """Logits of hidden rows, outside the graph."""
        return ModelOutput(logits=self._model.logits(hidden_rows))
