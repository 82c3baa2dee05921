"""`pick_random` for the CPU: the same tokens, with work saved where the data allow it.

A row without filters needs no sort, and a row with filters needs noise only for the tokens that are kept. The noise is
that of kernels/noise.py, bit for bit, in numpy with 32-bit integers and no temporaries.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from graphrunner.kernels import noise
from graphrunner.sampling.pick import LOGIT_LIMIT, WEIGHT_SCALE, RowParams, finite_logits

_FIRST_PREFIX = 1024
_HALF_OCTAVE = 0x00400000


def pick_random_on_host(logits: Tensor, params: RowParams) -> Tensor:
    """See `pick_random`. logits: [R, V], CPU; the result int32 [R], CPU. In graph: no."""
    logits = finite_logits(logits)
    first, second = (keys.tolist() for keys in noise.row_keys(params.seeds, params.positions))
    columns = (params.temperature, params.top_k, params.top_p, params.min_p)
    picked = []
    for index, (temperature, top_k, top_p, min_p) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        row = logits[index]
        if temperature <= 0:
            picked.append(int(row.argmax()))
            continue
        inverse = 1.0 / params.temperature[index]
        has_filters = 0 < top_k < row.shape[0] or top_p < 1.0 or min_p > 0.0
        token_ids = None
        if has_filters:
            token_ids = (row >= _threshold(row, inverse, top_k, top_p, min_p)).nonzero()[:, 0]
            row = row[token_ids]
        scores = (row * inverse).numpy() + _gumbel(first[index], second[index], token_ids, row.shape[0])
        best = int(scores.argmax())
        picked.append(best if token_ids is None else int(token_ids[best]))
    return torch.tensor(picked, dtype=torch.int32)


def _threshold(row: Tensor, inverse: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The smallest logit kept, a scalar tensor. Looks at a prefix of the order first; most nuclei are small."""
    vocab_size = row.shape[0]
    num_allowed = top_k if 0 < top_k < vocab_size else vocab_size
    size = num_allowed if num_allowed < vocab_size else min(_FIRST_PREFIX, vocab_size)
    while True:
        ordered = row.topk(size).values
        top = ordered[0].clamp(min=-LOGIT_LIMIT)
        shares = torch.exp((ordered - top) * inverse)
        is_kept = shares >= min_p
        if top_p < 1.0:
            weights = (shares * WEIGHT_SCALE).to(torch.int64)
            total = weights.sum()
            if size < num_allowed:
                total = (torch.exp((row - top) * inverse) * WEIGHT_SCALE).to(torch.int64).sum()
            is_kept &= (weights.cumsum(0) - weights).double() < torch.tensor(top_p).double() * total.double()
        num_kept = max(int(is_kept.sum()), 1)
        if num_kept < size or size == num_allowed:
            return ordered[num_kept - 1]
        size = num_allowed


def _mix_in_place(x: np.ndarray) -> None:
    """`noise.mix32` on uint32."""
    x ^= x >> 16
    x *= np.uint32(noise.MIX_A)
    x ^= x >> 15
    x *= np.uint32(noise.MIX_B)
    x ^= x >> 16


def _gumbel(first: int, second: int, token_ids: Tensor | None, count: int) -> np.ndarray:
    """`noise.gumbel_noise` of one row, for `token_ids` or for tokens 0 to count - 1: float32 [count]."""
    bits = np.arange(count, dtype=np.uint32) if token_ids is None else token_ids.numpy().astype(np.uint32)
    bits ^= np.uint32(first)
    _mix_in_place(bits)
    bits += np.uint32(second)
    _mix_in_place(bits)
    v = bits.astype(np.float32)
    v += np.float32(0.5)
    v *= np.float32(noise.UNIT)
    np.minimum(v, np.float32(noise.LARGEST_UNIFORM), out=v)
    fraction, exponent = _split(np.float32(1.0) - v)
    is_near_zero = v < np.float32(noise.NEAR_ZERO)
    np.copyto(fraction, -v, where=is_near_zero)
    exponent[is_near_zero] = 0.0
    return _minus_log(*_split(_minus_log(fraction, exponent)))


def _split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    bits = x.view(np.int32)
    exponent = ((bits + np.int32(_HALF_OCTAVE)) >> 23) - np.int32(127)
    mantissa = (bits - (exponent << 23)).view(np.float32)
    mantissa -= np.float32(1.0)
    return mantissa, exponent.astype(np.float32)


def _minus_log(fraction: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """-(log1p polynomial + exponent * ln 2); `exponent` is overwritten."""
    total = np.full_like(fraction, noise.LOG_COEFFICIENTS[0])
    for coefficient in noise.LOG_COEFFICIENTS[1:]:
        total *= fraction
        total += np.float32(coefficient)
    total *= fraction
    exponent *= np.float32(noise.LN_2)
    total += exponent
    return np.negative(total, out=total)
