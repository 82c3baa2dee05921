"""What a draft finds likeliest, of random requests with their noise in it.

Letters: N rows, V vocabulary of the draft, P slices of it. Twins: torch.topk and torch.logsumexp (of equal logits the
lowest token is the likelier one here), and speculative.draft_pick's formula of the noisy scores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.noise_kernels import gumbel, row_keys
from graphrunner.kernels.triton.sample import SamplingRows, filter_thresholds

_BLOCK = 1024
_LARGEST = tl.constexpr(1e30)
_LEAST = tl.constexpr(-3.0e38)
"""What no number and what a filter left out count as: above the places that hold no token at all."""
_NO_INDEX = tl.constexpr(2147483647)


@triton.jit
def _best_left(values, indices):
    """The largest value and the lowest index that has it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, indices, _NO_INDEX), 0)


@triton.jit
def _top_partials_kernel(
    scores_ptr, value_ptr, index_ptr, peak_ptr, mass_ptr, V, COUNT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(scores_ptr + row * V + token, mask=token < V, other=0.0).to(tl.float32)
    x = tl.where(x > _LEAST, x, _LEAST)
    x = tl.where(token < V, x, -float("inf"))
    piece = row * tl.num_programs(1) + tl.program_id(1)
    peak = tl.max(x, 0)
    tl.store(peak_ptr + piece, peak)
    tl.store(mass_ptr + piece, tl.sum(tl.exp(x - peak), 0))
    for rank in tl.static_range(COUNT):
        best, index = _best_left(x, token)
        tl.store(value_ptr + piece * COUNT + rank, best)
        tl.store(index_ptr + piece * COUNT + rank, index)
        x = tl.where(token == index, -float("inf"), x)


@triton.jit
def _top_kernel(
    value_ptr, index_ptr, peak_ptr, mass_ptr, ids_ptr, token_ptr, chance_ptr, V, P, COUNT: tl.constexpr,
    PIECES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    piece = tl.arange(0, PIECES)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    peaks = tl.load(peak_ptr + row * P + piece, mask=piece < P, other=-float("inf"))
    masses = tl.load(mass_ptr + row * P + piece, mask=piece < P, other=0.0)
    peak = tl.max(peaks, 0)
    log_sum = peak + tl.log(tl.sum(masses * tl.exp(peaks - peak), 0))
    is_in = i < P * COUNT
    values = tl.load(value_ptr + row * P * COUNT + i, mask=is_in, other=-float("inf"))
    indices = tl.load(index_ptr + row * P * COUNT + i, mask=is_in, other=_NO_INDEX)
    for rank in tl.static_range(COUNT):
        best, index = _best_left(values, indices)
        token = tl.load(ids_ptr + tl.minimum(index, V - 1))
        tl.store(token_ptr + row * COUNT + rank, token)
        tl.store(chance_ptr + row * COUNT + rank, best - log_sum)
        values = tl.where(indices == index, -float("inf"), values)


def top_tokens(scores: Tensor, count: int, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of each row, likeliest first.

    Args:
        scores: float [N, V], contiguous, device; NaN and what is infinitely unlikely come last.
        count: at most V.
        target_ids: int32 [V]; the token that each column stands for.

    Returns:
        int32 [N, count]; float32 [N, count], the log of their chances. In graph: yes. Sync: none.
    """
    num_rows, vocab_size = scores.shape
    assert scores.is_contiguous() and 0 < count <= vocab_size == target_ids.shape[0]
    num_pieces = runtime.cdiv(vocab_size, _BLOCK)
    values, chances, peaks, masses = (
        torch.empty(num_rows, size, dtype=torch.float32, device=scores.device)
        for size in (num_pieces * count, count, num_pieces, num_pieces)
    )
    indices, tokens = (
        torch.empty(num_rows, size, dtype=torch.int32, device=scores.device) for size in (num_pieces * count, count)
    )
    pdl = runtime.use_dependent_launch(scores.device)
    runtime.launch(
        _top_partials_kernel, (num_rows, num_pieces),
        scores, values, indices, peaks, masses, vocab_size, COUNT=count, BLOCK=_BLOCK, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    runtime.launch(
        _top_kernel, (num_rows,),
        values, indices, peaks, masses, target_ids, tokens, chances, vocab_size, num_pieces, COUNT=count,
        PIECES=runtime.next_power_of_2(num_pieces), BLOCK=runtime.next_power_of_2(num_pieces * count), PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return tokens, chances


@triton.jit
def _noisy_scores_kernel(
    scores_ptr, ids_ptr, threshold_ptr, temperature_ptr, seed_ptr, position_ptr, out_ptr, V, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < V
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(scores_ptr + row * V + column, mask=is_in, other=0.0).to(tl.float32)
    x = tl.where(x == x, tl.minimum(x, _LARGEST), -float("inf"))
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        first, second = row_keys(tl.load(seed_ptr + row), tl.load(position_ptr + row).to(tl.int32))
        token = tl.load(ids_ptr + column, mask=is_in, other=0)
        noisy = x * tl.div_rn(1.0, temperature) + gumbel(first, second, token)
        x = tl.where(x >= tl.load(threshold_ptr + row), noisy, -float("inf"))
    tl.store(out_ptr + row * V + column, x, mask=is_in)


def noisy_scores(scores: Tensor, target_ids: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    """Scores whose arg-max is the random request's token: filtered, with its noise in them.

    Args:
        scores: float [N, V], contiguous, device.
        target_ids: int32 [V]; the token that each column stands for, and has the noise of.
        rows: sampling parameters; temperature 0 leaves a row as it is.
        positions: int [N]; index of the drafted token in its sequence.

    Returns:
        float32 [N, V]. In graph: yes. Sync: none.
    """
    num_rows, vocab_size = scores.shape
    assert scores.is_contiguous() and target_ids.shape[0] == vocab_size
    thresholds = filter_thresholds(scores, rows)
    out = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=scores.device)
    pdl = runtime.use_dependent_launch(scores.device)
    runtime.launch(
        _noisy_scores_kernel, (num_rows, runtime.cdiv(vocab_size, _BLOCK)),
        scores, target_ids, thresholds, rows.temperature, rows.seed, positions, out, vocab_size, BLOCK=_BLOCK, PDL=pdl,
        num_warps=4, launch_pdl=pdl, enable_fp_fusion=False,
    )  # fmt: skip
    return out
