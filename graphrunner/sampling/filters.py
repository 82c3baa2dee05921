"""Which tokens stay in play: temperature, top-k, top-p, min-p, in that order. Capturable, no sync."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_and_filter(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits after temperature, with the tokens that may not be drawn at -inf.

    Args:
        logits: float32 [R, V].
        temperature, top_p, min_p: float32 [R]; temperature 0 rows are treated as 1 (they take the argmax anyway).
        top_k: int32 [R]; 0 keeps all.

    Returns:
        float32 [R, V]; the likeliest token of a row always stays. Ties at a border stay together for top-k and min-p;
        for top-p the order among equals is by token id.
    """
    scaled = logits / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    vocab_size = logits.shape[1]
    ordered, order = torch.sort(scaled, dim=1, descending=True, stable=True)
    kth = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size).long() - 1
    floor = ordered.gather(1, kth.unsqueeze(1))
    ordered = torch.where(ordered >= floor, ordered, -torch.inf)
    probabilities = torch.softmax(ordered, dim=1)
    before = torch.cumsum(probabilities, dim=1) - probabilities
    is_kept = (before < top_p.unsqueeze(1)) | (top_p >= 1.0).unsqueeze(1)
    is_kept[:, 0] = True
    is_kept &= probabilities >= min_p.unsqueeze(1) * probabilities[:, :1]
    ordered = torch.where(is_kept, ordered, -torch.inf)
    return torch.full_like(scaled, -torch.inf).scatter_(1, order, ordered)
