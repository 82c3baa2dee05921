"""What a draft is trained for, and how well it does: the loss, and accepted drafts a round on held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from drafts import Draft
from target import Corpus
from torch import Tensor
from torch.nn import functional

_LATER_STEP_WEIGHT = 0.85
_ARGMAX_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Greedy acceptance of chains of `num_drafts` drafts.

    Attributes:
        num_accepted: mean drafts accepted a round; the token that the target adds itself is not counted.
        by_step: share of all anchors whose first i + 1 drafts are right.
    """

    num_accepted: float
    by_step: tuple[float, ...]

    def __str__(self) -> str:
        steps = " ".join(f"{share:.3f}" for share in self.by_step)
        return f"accepted {self.num_accepted:.3f}, tokens a round {self.num_accepted + 1:.3f} (by step {steps})"


def loss_of(draft: Draft, corpus: Corpus, rows: Tensor) -> Tensor:
    """Cross-entropy of every step against the target, over the tokens that the target chose itself.

    The label is half the target's distribution over the draft vocabulary and half its argmax: the first is what
    sampling accepts by, the second what greedy decoding does. An argmax outside the draft vocabulary cannot be learned
    and leaves its half out.
    """
    tokens, taps = corpus.tokens[rows], corpus.tap(rows, draft.tap_layers).float()
    is_chosen, labels = corpus.is_chosen[rows], _labels(draft, corpus, rows)
    length, total, weight_sum = tokens.shape[1], torch.zeros((), device=tokens.device), 0.0
    for step, hidden in enumerate(draft(tokens, taps)):
        num_anchors = length - 2 - step
        chosen = is_chosen[:, 2 + step :].float()
        label = labels[:, 1 + step : 1 + step + num_anchors]  # of the token whose successor is predicted
        logits = draft.draft_logits(hidden[:, :num_anchors], step)
        losses = functional.cross_entropy(logits.flatten(0, 1).float(), label.flatten(0, 1), reduction="none")
        weight = _LATER_STEP_WEIGHT**step
        total = total + weight * (losses * chosen.flatten()).sum() / chosen.sum().clamp_min(1)
        weight_sum += weight
    return total / weight_sum


@torch.no_grad()
def acceptance(draft: Draft, corpus: Corpus, num_drafts: int, rows_at_once: int = 16) -> Acceptance:
    """Play greedy decoding of `corpus` (which must be greedy text) with the draft proposing chains."""
    num_drafts = min(num_drafts, draft.num_steps)
    rights, starts = [], []
    for first in range(0, corpus.tokens.shape[0], rows_at_once):
        rows = torch.arange(first, min(first + rows_at_once, corpus.tokens.shape[0]), device=corpus.tokens.device)
        rights.append(_right_steps(draft, corpus, rows, num_drafts).cpu())
        starts.append(corpus.is_chosen[rows].cpu())
    right, is_chosen = torch.cat(rights), torch.cat(starts)
    counts = [_accepted_by_round(right[row], is_chosen[row], num_drafts) for row in range(len(right))]
    flat = [count for row in counts for count in row]
    anchors = right[is_chosen[:, 1 : 1 + right.shape[1]]]
    by_step = tuple(float((anchors > step).float().mean()) for step in range(num_drafts))
    return Acceptance(sum(flat) / max(1, len(flat)), by_step)


def draft_places(draft: Draft) -> Tensor:
    """int64 [V]: the draft id of each target id, -1 where it has none."""
    places = torch.full((draft.target.config.vocab_size,), -1, device=draft.draft_ids.device)
    places[draft.draft_ids] = torch.arange(len(draft.draft_ids), device=draft.draft_ids.device)
    return places


@torch.no_grad()
def _labels(draft: Draft, corpus: Corpus, rows: Tensor) -> Tensor:
    """float32 [rows, L, W]: what the draft should say after each token."""
    last = corpus.tap(rows, (draft.target.config.num_layers,))[:, :, 0]
    labels = draft.target.logits(last, draft.draft_ids).softmax(-1) * (1 - _ARGMAX_SHARE)
    best = draft_places(draft)[corpus.best[rows]].unsqueeze(-1)
    return labels.scatter_add_(-1, best.clamp_min(0), _ARGMAX_SHARE * (best >= 0).float())


def _right_steps(draft: Draft, corpus: Corpus, rows: Tensor, num_drafts: int) -> Tensor:
    """int64 [rows, anchors]: how many drafts of the chain from each anchor equal the text."""
    tokens, taps = corpus.tokens[rows], corpus.tap(rows, draft.tap_layers).float()
    num_anchors = tokens.shape[1] - 1 - num_drafts
    alive = torch.ones(len(rows), num_anchors, dtype=torch.bool, device=tokens.device)
    right = torch.zeros_like(alive, dtype=torch.int64)
    for step, hidden in enumerate(draft(tokens, taps)[:num_drafts]):
        guess = draft.draft_ids[draft.draft_logits(hidden[:, :num_anchors], step).argmax(-1)]
        # A token that the script forced was nobody's choice: the chain ends in front of it.
        alive &= (guess == tokens[:, 2 + step :][:, :num_anchors]) & corpus.is_chosen[rows][:, 2 + step :][
            :, :num_anchors
        ]
        right += alive
    return right


def _accepted_by_round(right: Tensor, is_chosen: Tensor, num_drafts: int) -> list[int]:
    """Walk one row as decoding would: a round at anchor s accepts right[s] drafts and moves on by one more."""
    accepted, anchor = [], 0
    while anchor < len(right):
        is_inside = bool(is_chosen[anchor + 1]) and bool(is_chosen[anchor + 2 : anchor + 2 + num_drafts].all())
        if is_inside:
            accepted.append(int(right[anchor]))
            anchor += int(right[anchor]) + 1
        else:
            anchor += 1
    return accepted
