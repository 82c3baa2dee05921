"""Greedy and random sampling inside a graph.

Shape legend: R rows, V vocabulary, P partial results a row.

A row's token is the arg-max of logit / temperature + Gumbel noise over the tokens its filters keep, which is a draw
from the filtered softmax. The noise is a pure function of (seed, position, token): see kernels/noise.py.
Twins: reference_gpu.sample_tokens, reference_gpu.filter_threshold, torch.logsumexp.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.filter_kernels import filter_threshold_kernel
from graphrunner.kernels.triton.noise_kernels import gumbel, row_keys

_BLOCK = 2048
_NO_INDEX = tl.constexpr(2147483647)


@dataclass(frozen=True, slots=True)
class ArgmaxPartials:
    """The best logit of each slice of the vocabulary, and its token: float32 and int32 [R, P], device."""

    values: Tensor
    indices: Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of each row, device; the graph reads them where they are.

    Attributes:
        temperature: float32 [R]; 0 is greedy.
        top_k: int32 [R]; 0 keeps all.
        top_p: float32 [R]; 1 keeps all.
        min_p: float32 [R]; 0 keeps all.
        seed: int64 [R].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor


@triton.jit
def _best(values, indices, index_limit):
    """Largest value, and the lowest index that has it; an index in range even when every value is NaN."""
    best = tl.max(values, 0)
    index = tl.min(tl.where(values == best, indices, _NO_INDEX), 0)
    return best, tl.minimum(index, index_limit - 1)


@triton.jit
def _argmax_partials_kernel(logits_ptr, value_ptr, index_ptr, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(logits_ptr + row * V + token, mask=token < V, other=-float("inf")).to(tl.float32)
    best, index = _best(x, token, V)
    slot = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(value_ptr + slot, best)
    tl.store(index_ptr + slot, index)


@triton.jit
def _noisy_partials_kernel(
    logits_ptr, threshold_ptr, temperature_ptr, seed_ptr, position_ptr, value_ptr, index_ptr, V,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(logits_ptr + row * V + token, mask=token < V, other=-float("inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        first, second = row_keys(tl.load(seed_ptr + row), tl.load(position_ptr + row).to(tl.int32))
        scaled = x * tl.div_rn(1.0, temperature)
        noisy = scaled + gumbel(first, second, token)
        x = tl.where((x >= tl.load(threshold_ptr + row)) & (token < V), noisy, -float("inf"))
    best, index = _best(x, token, V)
    slot = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(value_ptr + slot, best)
    tl.store(index_ptr + slot, index)


@triton.jit
def _reduce_argmax_kernel(
    value_ptr, index_ptr, token_ptr, ids_ptr, P, num_ids, BLOCK: tl.constexpr, HAS_IDS: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    index = tl.full([BLOCK], _NO_INDEX, tl.int32)
    for start in range(0, P, BLOCK):
        is_real = start + i < P
        value = tl.load(value_ptr + row * P + start + i, mask=is_real, other=-float("inf"))
        token = tl.load(index_ptr + row * P + start + i, mask=is_real, other=_NO_INDEX)
        is_better = (value > best) | ((value == best) & (token < index))
        best = tl.where(is_better, value, best)
        index = tl.where(is_better, token, index)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, index, _NO_INDEX), 0)
    # All-NaN logits name no token: answer 0, which at least exists.
    token = tl.where(token == _NO_INDEX, 0, token)
    if HAS_IDS:
        token = tl.load(ids_ptr + tl.minimum(token, num_ids - 1))
    tl.store(token_ptr + row, token)


@triton.jit
def _log_sum_kernel(logits_ptr, sum_ptr, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row a program, whatever the others are."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits_ptr + row * V + start + i, mask=start + i < V, other=-float("inf"))
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    top = tl.where(top == -float("inf"), 0.0, top)  # a row of nothing else sums up to 0
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits_ptr + row * V + start + i, mask=start + i < V, other=-float("inf"))
        total += tl.exp(x - top)
    tl.store(sum_ptr + row, top + tl.log(tl.sum(total, 0)))


def _new_partials(logits: Tensor) -> ArgmaxPartials:
    num_partials = runtime.cdiv(logits.shape[1], _BLOCK)
    return ArgmaxPartials(
        logits.new_empty(logits.shape[0], num_partials, dtype=torch.float32),
        logits.new_empty(logits.shape[0], num_partials, dtype=torch.int32),
    )


def argmax_partials(logits: Tensor) -> ArgmaxPartials:
    """Best (value, token) of each slice of the vocabulary.

    Args:
        logits: float [R, V], contiguous, device.

    Returns:
        Partials for reduce_argmax. In graph: yes. Sync: none.
    """
    assert logits.is_contiguous()
    partials = _new_partials(logits)
    pdl = runtime.use_dependent_launch(logits.device)
    runtime.launch(
        _argmax_partials_kernel,
        partials.values.shape,
        logits,
        partials.values,
        partials.indices,
        logits.shape[1],
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return partials


def reduce_argmax(partials: ArgmaxPartials, token_ids: Tensor | None = None) -> Tensor:
    """The greedy token of each row; the lowest of equals.

    Args:
        token_ids: int32 [V]; the token that each index stands for; None is the index itself.

    Returns:
        int32 [R], device. In graph: yes. Sync: none.
    """
    num_rows, num_partials = partials.values.shape
    tokens = partials.indices.new_empty(num_rows)
    pdl = runtime.use_dependent_launch(tokens.device)
    block = min(1024, runtime.next_power_of_2(num_partials))
    runtime.launch(
        _reduce_argmax_kernel,
        (num_rows,),
        partials.values,
        partials.indices,
        tokens,
        tokens if token_ids is None else token_ids,
        num_partials,
        0 if token_ids is None else token_ids.shape[0],
        BLOCK=block,
        HAS_IDS=token_ids is not None,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return tokens


def greedy_tokens(logits: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Arg-max of each row, the lowest index of equals: int32 [R] from float [R, V]; see `reduce_argmax`."""
    return reduce_argmax(argmax_partials(logits), token_ids)


def filter_thresholds(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The smallest logit each row's top-k, top-p and min-p keep, applied in this order; ties with it are kept.

    Args:
        logits: float [R, V], contiguous, device.
        rows: sampling parameters.

    Returns:
        float32 [R]; -inf where nothing is filtered. In graph: yes. Sync: none.
    """
    num_rows, vocab_size = logits.shape
    thresholds = logits.new_empty(num_rows, dtype=torch.float32)
    pdl = runtime.use_dependent_launch(logits.device)
    runtime.launch(
        filter_threshold_kernel, (num_rows,),
        logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, thresholds, vocab_size,
        BLOCK=min(8192, runtime.next_power_of_2(vocab_size)), KEY_BITS=8 * logits.dtype.itemsize, PDL=pdl,
        num_warps=16, launch_pdl=pdl,
    )  # fmt: skip
    return thresholds


def row_log_sums(logits: Tensor) -> Tensor:
    """log(sum(exp(row))) of each row, summed in one order however many rows there are.

    Args:
        logits: float32 [R, V], contiguous, device; no NaN, no plus infinity.

    Returns:
        float32 [R]; -inf for a row of minus infinities. In graph: yes. Sync: none.
    """
    assert logits.is_contiguous() and logits.dtype is torch.float32
    sums = logits.new_empty(logits.shape[0])
    if logits.shape[0] == 0:
        return sums
    block, pdl = min(4096, runtime.next_power_of_2(logits.shape[1])), runtime.use_dependent_launch(logits.device)
    runtime.launch(
        _log_sum_kernel, (logits.shape[0],),
        logits, sums, logits.shape[1], BLOCK=block, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return sums


def sample_tokens(logits: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    """One token a row: greedy where temperature is 0, else drawn from the filtered softmax.

    Args:
        logits: float [R, V], contiguous, device.
        rows: sampling parameters.
        positions: int [R]; index the sampled token will have in its sequence.

    Returns:
        int32 [R], device; a function of the row alone. In graph: yes. Sync: none.
    """
    assert logits.is_contiguous()
    thresholds = filter_thresholds(logits, rows)
    partials = _new_partials(logits)
    pdl = runtime.use_dependent_launch(logits.device)
    runtime.launch(
        _noisy_partials_kernel, partials.values.shape,
        logits, thresholds, rows.temperature, rows.seed, positions, partials.values, partials.indices, logits.shape[1],
        BLOCK=_BLOCK, PDL=pdl, num_warps=8, launch_pdl=pdl, enable_fp_fusion=False,
    )  # fmt: skip
    return reduce_argmax(partials)
