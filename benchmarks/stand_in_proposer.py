"""A draft of given acceptance, at the cost of a real one, for a target of random weights.

The target is made predictable at the full cost of its shape: its embedding outweighs what the layers add, and its head
is that embedding, shifted by one row. So it counts upwards, whatever is computed in between, and rounding cannot change
that. The stand-in runs its own forwards like any draft model, then says the right token with probability `ACCEPTANCE`,
whatever the row and the position, and else a wrong one. Of some such sequences each row has the one over which as many
drafts stand as the probability lets expect: a run of a few hundred rounds is not a matter of luck.
"""

from __future__ import annotations

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
_NUM_SEQUENCES, _FIRST_PLACE, _NUM_PARTS = 64, 32, 6
"""How many there are to choose from, where prompts end, and how finely answers are told apart by length."""


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
        is_wrong = likely_wrong(num_rows, num_places, max(self.counts)).to(given.device)
        self._steps = (1 + is_wrong).to(torch.int32)
        super().bind(context)

    def _step(self, batch: ForwardBatch, variant: ForwardVariant) -> torch.Tensor:
        super()._step(batch, variant)
        ids, positions = batch.input_ids, batch.positions
        if batch.num_tokens > batch.num_reqs:
            ids, positions = ids[batch.logits_indices], positions[batch.logits_indices]
        return (ids + self._steps[batch.request_rows.long(), positions]) % self.model.config.vocab_size


def likely_wrong(num_rows: int, num_places: int, num_drafts: int) -> torch.Tensor:
    """bool [num_rows, num_places]: where the draft is wrong.

    Args:
        num_drafts: of a round; over rounds of that many, the mean of those that stand is near its expectation.
    """
    is_right = torch.rand(_NUM_SEQUENCES, num_rows, num_places, generator=torch.Generator().manual_seed(0)) < ACCEPTANCE
    expected = sum(ACCEPTANCE**power for power in range(1, num_drafts + 1))
    ends = [num_places * part // _NUM_PARTS for part in range(2, _NUM_PARTS + 1)]  # where answers of some length end
    found = torch.stack([mean_standing(is_right[..., :end], num_drafts) for end in ends])
    best = (found - expected).abs().amax(0).argmin(0)
    return ~is_right[best, torch.arange(num_rows)]


def mean_standing(is_right: torch.Tensor, num_drafts: int) -> torch.Tensor:
    """float [...]: drafts that stand in a round, of bool [..., num_places], where rounds follow one another."""
    num_places = is_right.shape[-1] - num_drafts
    windows = is_right.unfold(-1, num_drafts, 1)[..., :num_places, :]
    standing = windows.long().cumprod(-1).sum(-1)
    place = torch.full(is_right.shape[:-1], _FIRST_PLACE, dtype=torch.int64)
    num_rounds, total = torch.zeros_like(place), torch.zeros_like(place)
    while (is_inside := place < num_places).any():
        stands = standing.gather(-1, place.clamp(max=num_places - 1).unsqueeze(-1)).squeeze(-1)
        total += stands * is_inside
        num_rounds += is_inside
        place += stands + 1
    return total / num_rounds
