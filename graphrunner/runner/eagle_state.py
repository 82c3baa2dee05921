"""What an EAGLE extend leaves for the draft loop after it."""

from __future__ import annotations

import torch


class EagleState:
    """Static rows, in the order of the batch whose drafts are made next.

    Attributes:
        hidden: model dtype [max_reqs, C]; the draft's output at each row's newest position.
        token_ids: int32 [max_reqs]; the first draft of each row.
    """

    def __init__(self, max_reqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.hidden = torch.zeros(max_reqs, hidden_size, dtype=dtype, device=device)
        self.token_ids = torch.zeros(max_reqs, dtype=torch.int32, device=device)

    def store(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Overwrite the first rows. In graph: yes."""
        self.hidden[: hidden.shape[0]].copy_(hidden)
        self.token_ids[: token_ids.shape[0]].copy_(token_ids)
