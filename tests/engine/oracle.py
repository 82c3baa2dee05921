"""Proposers that know the answer: speculative_config={"method": "oracle", "model": "device:mixed", ...}.

`model` is where drafts are made (host, device) and what they are: right, wrong, or mixed (right where a hash says so).
`ANSWERS` maps a prompt to what the target goes on with.
"""

from collections.abc import Sequence

import torch
from engine_driver import VOCAB_SIZE

from graphrunner.config.speculative_config import SpeculativeConfig
from graphrunner.core.scheduled_batch import RowInit
from graphrunner.speculative.proposer import (
    DeviceProposer,
    DraftRound,
    DraftSequence,
    HostProposer,
    Proposer,
    ProposerContext,
    Target,
)

ANSWERS: dict[tuple[int, ...], list[int]] = {}


def create_proposer(config: SpeculativeConfig, target: Target) -> Proposer:
    place, kind = (config.model or "host:right").split(":")
    return HostOracle(kind) if place == "host" else DeviceOracle(kind, target.max_model_len)


def draft_at(answers: Sequence[int], position: int, kind: str) -> int:
    """The draft for an output position; a wrong one past what is known."""
    token = answers[position] if position < len(answers) else 0
    is_right = kind == "right" or (kind == "mixed" and (position * 2654435761 >> 7) % 10 < 7)
    return token if is_right else (token + 1) % VOCAB_SIZE


class HostOracle(HostProposer):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def propose(self, sequences: Sequence[DraftSequence]) -> list[Sequence[int]]:
        drafts = []
        for sequence in sequences:
            answers, start = ANSWERS.get(tuple(sequence.prompt_token_ids), []), len(sequence.output_token_ids)
            drafts.append([draft_at(answers, start + place, self.kind) for place in range(sequence.num_drafts)])
        return drafts


class DeviceOracle(DeviceProposer):
    def __init__(self, kind: str, max_model_len: int) -> None:
        self.kind, self.max_len = kind, max_model_len

    def bind(self, context: ProposerContext) -> None:
        self.table, self.width = context.runner_context.table, context.max_drafts
        shape = (self.table.last_token.shape[0], self.max_len + self.width + 2)
        self.answers = torch.zeros(shape, dtype=torch.int32, device=self.table.last_token.device)

    def take_rows(self, row_inits: Sequence[RowInit]) -> None:
        for init in row_inits:
            known, start = ANSWERS.get(init.prompt_token_ids, []), len(init.prompt_token_ids)
            drafts = [draft_at(known, place, self.kind) for place in range(self.answers.shape[1] - start)]
            self.answers[init.row, start:] = torch.tensor(drafts, dtype=torch.int32, device=self.answers.device)

    def propose(self, round_: DraftRound) -> None:
        rows = round_.forward_batch.request_rows[: round_.batch.num_reqs].long()
        places = self.table.num_computed[rows].unsqueeze(1) + 1 + torch.arange(round_.num_drafts, device=rows.device)
        drafts = self.answers[rows].gather(1, places.clamp(max=self.answers.shape[1] - 1).long())
        self.table.draft_tokens[rows] = -1
        self.table.draft_tokens[rows, : round_.num_drafts] = drafts
