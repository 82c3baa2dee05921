"""A draft of given acceptance, at the cost of a real one, for a target of random weights.

The target is made predictable at the full cost of its shape: its embedding outweighs what the layers add, and its head
is that embedding, shifted by one row. So it counts upwards, whatever is computed in between, and rounding cannot change
that. The stand-in runs its own forwards like any draft model, then says the right token with probability `ACCEPTANCE`,
whatever the row and the position, and else a wrong one. Short and long runs of right ones come in the shares that the
probability lets expect, soon after one another: a benchmark of a few hundred rounds is not a matter of luck.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.shape_key import ForwardVariant
from graphrunner.models.causal_lm import CausalLM
from graphrunner.speculative import draft_model
from graphrunner.speculative.draft_model import DraftModelProposer
from graphrunner.speculative.proposer import ProposerContext, Target
from graphrunner.weights.dummy import iterate_dummy

ACCEPTANCE = 0.7
NUM_SPARE_POSITIONS = 16
"""Past the context limit, where padding may stand."""
_EMBEDDING_SCALE = 800.0
_BLOCK = 16
"""Runs of right drafts that are shuffled among themselves."""


def create_proposer(config: SpeculativeConfig, target: Target) -> DraftModelProposer:
    """Make the target predictable, and a dummy draft of `config.model`'s shape beside it."""
    assert isinstance(target.model, CausalLM), "the shape must have a native model"
    target.model.load_weights(_counting(target.model, target.seed))
    made = draft_model.create_proposer(config, target)
    return StandIn(made.model, made.counts)


def _counting(model: CausalLM, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Dummy weights of a model that says t + 1 after t."""
    embedding = None
    options = model.options
    for name, tensor in iterate_dummy(model.config, options.weight_dtype or options.dtype, options.device, seed):
        if "embed_tokens" in name:
            embedding = tensor.mul_(_EMBEDDING_SCALE)
        if "lm_head" in name:
            assert embedding is not None, "the embedding comes first"
            tensor.copy_(torch.roll(embedding, 1, dims=0))
        yield name, tensor


class StandIn(DraftModelProposer):
    """A draft model whose words are put into its mouth."""

    def bind(self, context: ProposerContext) -> None:
        """See `Proposer.bind`. What is right where is decided once: a real draft spends nothing on it."""
        given = context.runner_context
        num_rows, num_places = given.table.max_num_seqs + 1, given.max_seq_len + NUM_SPARE_POSITIONS
        is_wrong = evenly_wrong(num_rows, num_places).to(given.device)
        self._steps = (1 + is_wrong).to(torch.int32)
        super().bind(context)

    def _step(self, batch: ForwardBatch, variant: ForwardVariant) -> torch.Tensor:
        super()._step(batch, variant)
        ids, positions = batch.input_ids, batch.positions
        if batch.num_tokens > batch.num_reqs:
            ids, positions = ids[batch.logits_indices], positions[batch.logits_indices]
        return (ids + self._steps[batch.request_rows.long(), positions]) % self.model.config.vocab_size


def evenly_wrong(num_rows: int, num_places: int) -> torch.Tensor:
    """bool [num_rows, num_places]: where the draft is wrong.

    How many right drafts stand before a wrong one is geometrically distributed. Each row draws such numbers from a
    scrambled Sobol sequence: in every block of them, small or large, each share of the distribution has its part. So
    any round, however many drafts it has and wherever it starts, finds each of its drafts right with probability
    `ACCEPTANCE`, and the share of those found right is near it after a few rounds. Blocks of `_BLOCK` are shuffled, as
    the sequence itself goes up and down.
    """
    sobol = torch.quasirandom.SobolEngine(num_rows, scramble=True, seed=0)
    num_blocks = -(-num_places // _BLOCK)  # enough if no draft were right
    quantiles = sobol.draw(num_blocks * _BLOCK, dtype=torch.float64).T.reshape(num_rows, num_blocks, _BLOCK)
    order = torch.rand(quantiles.shape, generator=torch.Generator().manual_seed(0)).argsort(-1)
    num_right = (torch.log1p(-quantiles.gather(-1, order)) / math.log(ACCEPTANCE)).long().flatten(1)
    wrong_places = (num_right + 1).cumsum(1) - 1
    is_wrong = torch.zeros(num_rows, num_places + 1, dtype=torch.bool)
    return is_wrong.scatter_(1, wrong_places.clamp(max=num_places), True)[:, :-1]
