"""Repetition, presence and frequency penalties: token counts, on the device, for the requests that need them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.scheduled_batch import RowInit
from graphrunner.device.transfer import to_device


def penalized(
    logits: torch.Tensor, is_in_prompt: torch.Tensor, counts: torch.Tensor, strengths: torch.Tensor
) -> torch.Tensor:
    """Penalized logits; a new tensor.

    Repetition (Keskar et al. 2019, CTRL) divides the logits that are above 0 and multiplies the others, for tokens of
    the prompt or the output. Presence and frequency (the OpenAI API) subtract, for tokens of the output only.

    Args:
        logits: fp32 [n, V].
        is_in_prompt: bool [n, V].
        counts: int32 [n, V]; how often the token stands in the output.
        strengths: fp32 [n, 3]: repetition, presence, frequency.
    """
    repetition, presence, frequency = (strengths[:, column : column + 1] for column in range(3))
    factor = torch.where(logits > 0, 1.0 / repetition, repetition)
    logits = torch.where(is_in_prompt | (counts > 0), logits * factor, logits)
    return logits - presence * (counts > 0) - frequency * counts


class PenaltyState:
    """Token counts of the requests with penalties. A slot is one such request; memory grows by doubling."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._is_in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._strengths = torch.ones(0, 3, dtype=torch.float32, device=device)

    def __contains__(self, row: int) -> bool:
        return row in self._slots

    def release(self, row: int) -> None:
        """Forget a row. Idempotent."""
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def start(self, init: RowInit) -> None:
        """Count a new or resumed request's tokens afresh. Sync: none."""
        self.release(init.row)
        if not self._free:
            self._grow()
        slot = self._slots[init.row] = self._free.pop()
        self._strengths[slot] = to_device(_strengths(init.sampling_params), self._device)
        prompt = torch.tensor(init.prompt_token_ids, dtype=torch.int64)
        self._is_in_prompt[slot].zero_().index_fill_(0, to_device(prompt, self._device), True)
        self._counts[slot].zero_()
        if init.output_token_ids:
            output = to_device(torch.tensor(init.output_token_ids, dtype=torch.int64), self._device)
            self._counts[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def slots_of(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """(indices into `rows`, slots) of those rows that have penalties."""
        found = [(index, self._slots[row]) for index, row in enumerate(rows) if row in self._slots]
        return [index for index, _ in found], [slot for _, slot in found]

    def apply(self, logits: torch.Tensor, indices: torch.Tensor, slots: torch.Tensor) -> None:
        """Penalize rows `indices` (int64 [n]) of fp32 [R, V] in place, by the counts of `slots` (int64 [n])."""
        changed = penalized(logits[indices], self._is_in_prompt[slots], self._counts[slots], self._strengths[slots])
        logits.index_copy_(0, indices, changed)

    def count(self, slots: torch.Tensor, token_ids: torch.Tensor, times: torch.Tensor | int = 1) -> None:
        """Add a token (integer [n]) to each of `slots` (int64 [n], distinct), or `times` (int32 [n]) of them.

        A token id of -1 stands for none.
        """
        self._counts[slots, token_ids.clamp(min=0)] += (token_ids >= 0).to(torch.int32) * times

    def _grow(self) -> None:
        num_old = self._counts.shape[0]
        num_new = max(2 * num_old, 4)
        for name in ("_counts", "_is_in_prompt", "_strengths"):
            old = getattr(self, name)
            new = torch.zeros(num_new, old.shape[1], dtype=old.dtype, device=self._device)
            new[:num_old] = old
            setattr(self, name, new)
        self._free.extend(range(num_new - 1, num_old - 1, -1))


def _strengths(params: SamplingParams) -> torch.Tensor:
    values = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return torch.tensor(values, dtype=torch.float32)
