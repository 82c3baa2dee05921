"""Rounds with prompts in them: any mix of chunks and decode rows, taken in eagerly, as the target ran them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from graphrunner.core.forward_batch import ForwardBatch, KVLayer
from graphrunner.core.scheduled_batch import RowInit, ScheduledBatch
from graphrunner.device.transfer import to_device
from graphrunner.speculative.proposer import DraftRound


class PromptTokens:
    """The tokens that rows came with. A chunk that ends inside them is followed by one that only the host knows."""

    def __init__(self) -> None:
        self._inits: dict[int, RowInit] = {}

    def take_rows(self, row_inits: Sequence[RowInit]) -> None:
        """See `Proposer.take_rows`."""
        self._inits.update({init.row: init for init in row_inits})

    def at(self, row: int, position: int) -> int:
        """The token at a position, -1 where the row did not come with one."""
        init = self._inits.get(row)
        if init is None:
            return -1
        num_prompt = len(init.prompt_token_ids)
        if position < num_prompt:
            return init.prompt_token_ids[position]
        outputs = init.output_token_ids
        return outputs[position - num_prompt] if position - num_prompt < len(outputs) else -1


class PromptRound:
    """A non-uniform round on the device.

    Args:
        round_: of mode PREFILL or MIXED.
        known: tokens of its rows.
        kv_layers: the draft's own.
        num_ahead: how many places after a chunk's end somebody reads.

    Attributes:
        batch: the target's own views over the draft's KV; `input_ids` are the tokens after each position.
        chosen: the requests that got a token, by place in the batch.
        last: int64 [R], device; each request's newest token in the batch.
        request_rows: int32 [len(chosen)], device.
    """

    def __init__(
        self, round_: DraftRound, known: PromptTokens, kv_layers: tuple[KVLayer, ...], num_ahead: int = 1
    ) -> None:
        step, views = round_.batch, round_.forward_batch
        self.chosen = [index for index, samples in enumerate(step.samples) if samples]
        self._known = _known_after(step, known, num_ahead)
        ends = torch.tensor(step.query_lens, dtype=torch.int64).cumsum(0) - 1
        columns = torch.stack((ends, *self._known.unbind(1)))
        device = round_.token_ids.device
        staged = to_device(columns, device)
        chosen = to_device(torch.tensor(self.chosen, dtype=torch.int64), device)
        self.last, self._after = staged[0], staged[1:]
        self.request_rows = views.request_rows[: step.num_reqs].index_select(0, chosen)
        self.chosen_last = self.last.index_select(0, chosen)
        self._chosen = chosen
        next_ids = self._shifted(views.input_ids, 0, round_.token_ids[:, 0])
        self.batch: ForwardBatch = replace(views, kv_layers=kv_layers, input_ids=next_ids)

    def hidden(self, hidden_states: Tensor | None) -> Tensor:
        """The target's hidden states, padded to the views: [T, H]."""
        assert hidden_states is not None, "the target was asked for them"
        num_missing = self.batch.num_tokens - hidden_states.shape[0]
        if num_missing == 0:
            return hidden_states
        return torch.cat((hidden_states, hidden_states.new_zeros(num_missing, hidden_states.shape[1])))

    def moved_on(self, place: int, drafts: Tensor) -> PromptRound:
        """The same round one token further: after the heads before `place` have drafted (int32, of `chosen`)."""
        moved = object.__new__(PromptRound)
        moved.__dict__.update(self.__dict__)
        made = torch.zeros(len(self.last), dtype=torch.int32, device=drafts.device)
        made.index_copy_(0, self._chosen, drafts)
        moved.batch = replace(self.batch, input_ids=self._shifted(self.batch.input_ids, place, made))
        return moved

    def _shifted(self, token_ids: Tensor, place: int, made: Tensor) -> Tensor:
        """Tokens one place further on; after each request's end what the host knows, or else what was `made`."""
        known = self._after[place].to(token_ids.dtype)
        ends = torch.where(known >= 0, known, made.to(token_ids.dtype).clamp(min=0))
        return torch.cat((token_ids[1:], token_ids[:1])).index_copy(0, self.last, ends)


def _known_after(step: ScheduledBatch, known: PromptTokens, num_ahead: int) -> Tensor:
    """int64 [R, num_ahead]: tokens after each request's last one in the step, -1 where nobody knows."""
    columns = zip(step.rows, step.cached_lens, step.query_lens, step.samples, strict=True)
    return torch.tensor(
        [
            [-1 if samples else known.at(row, cached + query + ahead) for ahead in range(num_ahead)]
            for row, cached, query, samples in columns
        ],
        dtype=torch.int64,
    )
