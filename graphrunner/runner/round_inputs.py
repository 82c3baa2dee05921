"""What a proposer reads of a verify step, at addresses of its own: the step's recording leaves it there itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.outputs import ModelOutput
from graphrunner.kernels.tracing import has_gpu_kernels


class RoundKeeper(Protocol):
    """Keeps what a verify step found, for the drafts after it."""

    def keep(self, views: ForwardBatch, output: ModelOutput) -> ModelOutput:
        """Copy what is needed, at the end of a step that accepts its drafts. In graph: yes. Sync: none.

        Args:
            views: of the step, padded.
            output: with `token_ids` and `num_new`.

        Returns:
            The output, with what was copied in place of what it was copied from: so a proposer sees that it was.
        """
        ...


class RoundInputs:
    """What an extend reads of the target's step, at fixed addresses. A `RoundKeeper`.

    Args:
        max_reqs, max_width: the largest round.
        hidden_size: numbers a token.
        is_aux: `hidden` are the outputs of inner layers, not the last hidden states.

    Attributes:
        token_ids: int32 [max_reqs * max_width]; num_new: int32 [max_reqs]; hidden: [max_reqs * max_width, hidden_size].
    """

    def __init__(
        self,
        max_reqs: int,
        max_width: int,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        is_aux: bool = False,
    ) -> None:
        self.token_ids = torch.zeros(max_reqs * max_width, dtype=torch.int32, device=device)
        self.num_new = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self.hidden = torch.zeros(max_reqs * max_width, hidden_size, dtype=dtype, device=device)
        self._is_aux = is_aux

    def keep(self, views: ForwardBatch, output: ModelOutput) -> ModelOutput:
        """See `RoundKeeper.keep`."""
        hidden = output.aux_hidden_states if self._is_aux else output.hidden_states
        assert output.token_ids is not None and output.num_new is not None, "a step that accepts its drafts"
        assert hidden is not None, "the target was asked for its hidden states"
        self._copy(output.token_ids, output.num_new, hidden)
        num_reqs, num_tokens = views.num_reqs, views.num_tokens
        kept = self.hidden[:num_tokens]
        return replace(
            output,
            token_ids=self.token_ids[:num_tokens].view(num_reqs, -1),
            num_new=self.num_new[:num_reqs],
            hidden_states=output.hidden_states if self._is_aux else kept,
            aux_hidden_states=kept if self._is_aux else output.aux_hidden_states,
        )

    def take(self, token_ids: torch.Tensor, num_new: torch.Tensor, hidden: torch.Tensor) -> None:
        """Copy a round in, unless its step kept it: int32 [R, W], int32 [R], [R * W, hidden_size]. Sync: none."""
        if num_new.data_ptr() != self.num_new.data_ptr():
            self._copy(token_ids, num_new, hidden)

    def poison(self, value: int) -> None:
        """Overwrite everything; the floats with NaN."""
        self.token_ids.fill_(value)
        self.num_new.fill_(value)
        self.hidden.fill_(float("nan"))

    def _copy(self, token_ids: torch.Tensor, num_new: torch.Tensor, hidden: torch.Tensor) -> None:
        if has_gpu_kernels(hidden):
            from graphrunner.kernels.triton import round_rows

            tokens = token_ids.reshape(-1)
            round_rows.copy_round(hidden.contiguous(), tokens, self.hidden, self.token_ids, num_new, self.num_new)
            return
        self.token_ids[: token_ids.numel()].copy_(token_ids.reshape(-1))
        self.num_new[: num_new.shape[0]].copy_(num_new)
        self.hidden[: hidden.shape[0]].copy_(hidden)


class NewestInputs:
    """What a draft model reads of the target's step beyond the request table. A `RoundKeeper`.

    Attributes:
        before_last: int32 [max_reqs]; the token before each row's newest one; num_new: int32 [max_reqs].
    """

    def __init__(self, max_reqs: int, device: torch.device) -> None:
        self.before_last = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self.num_new = torch.zeros(max_reqs, dtype=torch.int32, device=device)

    def keep(self, views: ForwardBatch, output: ModelOutput) -> ModelOutput:
        """See `RoundKeeper.keep`."""
        assert output.num_new is not None, "a step that accepts its drafts"
        num_reqs = views.num_reqs
        if has_gpu_kernels(views.input_ids):
            from graphrunner.kernels.triton import round_rows

            round_rows.keep_newest(views.input_ids, output.num_new, self.before_last, self.num_new)
            return replace(output, num_new=self.num_new[:num_reqs])
        num_new = self.num_new[:num_reqs].copy_(output.num_new)
        self.take(newest_read(views.input_ids, num_new, views.num_tokens // num_reqs))
        return replace(output, num_new=num_new)

    def has_kept(self, num_new: torch.Tensor) -> bool:
        """Whether a step with this result was kept by its recording."""
        return num_new.data_ptr() == self.num_new.data_ptr()

    def take(self, before_last: torch.Tensor) -> None:
        """Copy in the token before each row's newest one, int32 [R], in batch order. Sync: none."""
        self.before_last[: before_last.shape[0]].copy_(before_last)


def newest_read(input_ids: torch.Tensor, num_new: torch.Tensor, width: int) -> torch.Tensor:
    """int32 [R]: of input ids int32 [R * width], the last of each row that stands: the one before its newest token."""
    before = torch.arange(-1, num_new.shape[0] * width - 1, width, device=num_new.device)
    # Clamped for a rehearsal, where nobody wrote the counts.
    return input_ids.index_select(0, (before + num_new).clamp_(0, input_ids.shape[0] - 1))
