"""Top-k, top-p and min-p without a sort: a bitwise search for the smallest logit that is kept.

Floats are mapped to integers of the same order, and the threshold is found bit by bit from the top, one pass over the
row a bit: as many passes as the logits have bits (16 for bfloat16 and float16), from L2.
"""

import triton
import triton.language as tl

_LOGIT_LIMIT = tl.constexpr(1e30)  # what plus infinity counts as; NaN counts as minus infinity


@triton.jit
def _to_key(x, KEY_BITS: tl.constexpr):
    """Order-preserving unsigned key (int64 holds it) of a 16- or 32-bit float; NaN and -inf sort lowest."""
    SIGN: tl.constexpr = 1 << (KEY_BITS - 1)
    if KEY_BITS == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:
        bits = x.to(tl.int32, bitcast=True)
    bits = bits.to(tl.int64) & ((1 << KEY_BITS) - 1)
    key = tl.where((bits & SIGN) != 0, ((1 << KEY_BITS) - 1) - bits, bits | SIGN)
    wide = x.to(tl.float32)
    return tl.where(wide == wide, key, 0)


@triton.jit
def _from_key(key, dtype: tl.constexpr, KEY_BITS: tl.constexpr):
    """The float32 value of a key."""
    SIGN: tl.constexpr = 1 << (KEY_BITS - 1)
    bits = tl.where((key & SIGN) != 0, key & (SIGN - 1), ((1 << KEY_BITS) - 1) - key)
    if KEY_BITS == 16:
        return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:
        return bits.to(tl.int32).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _count_and_mass(
    row_ptr, V, low_key, highest, inverse_temperature, BLOCK: tl.constexpr, KEY_BITS: tl.constexpr,
    IS_MASS: tl.constexpr,
):  # fmt: skip
    """How many tokens (or how much exp((x - highest) / T)) have a key >= low_key."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(row_ptr + start + i, mask=start + i < V, other=-float("inf"))
        wide = x.to(tl.float32)
        is_in = (_to_key(x, KEY_BITS) >= low_key) & (start + i < V) & (wide == wide)
        if IS_MASS:
            amount = tl.exp((tl.minimum(wide, _LOGIT_LIMIT) - highest) * inverse_temperature)
        else:
            amount = tl.full([BLOCK], 1.0, tl.float32)
        total += tl.where(is_in, amount, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _search(
    row_ptr, V, target, highest, inverse_temperature, BLOCK: tl.constexpr, KEY_BITS: tl.constexpr,
    IS_MASS: tl.constexpr,
):  # fmt: skip
    """The largest key such that the tokens at or above it reach the target amount."""
    key = tl.zeros([], tl.int64)
    for bit in range(KEY_BITS):
        candidate = key | (tl.full([], 1, tl.int64) << (KEY_BITS - 1 - bit))
        amount = _count_and_mass(row_ptr, V, candidate, highest, inverse_temperature, BLOCK, KEY_BITS, IS_MASS)
        key = tl.where(amount >= target, candidate, key)
    return key


@triton.jit
def _highest(row_ptr, V, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(row_ptr + start + i, mask=start + i < V, other=-float("inf")).to(tl.float32)
        best = tl.maximum(best, x)
    return tl.minimum(tl.max(best, 0), _LOGIT_LIMIT)


@triton.jit
def filter_threshold_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, threshold_ptr, V,
    BLOCK: tl.constexpr, KEY_BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program; a row that filters nothing returns at once."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    threshold = tl.full([], -float("inf"), tl.float32)
    has_top_k = (top_k > 0) & (top_k < V)
    if (temperature > 0.0) & (has_top_k | (top_p < 1.0) | (min_p > 0.0)):
        inverse = 1.0 / temperature
        highest = _highest(row_ptr, V, BLOCK)
        key = tl.zeros([], tl.int64)
        if has_top_k:
            key = _search(row_ptr, V, top_k.to(tl.float32), highest, inverse, BLOCK, KEY_BITS, False)
        if top_p < 1.0:
            # Renormalised over what top-k kept. A sum that rounds below the target falls back to keeping all of it.
            kept = _count_and_mass(row_ptr, V, key, highest, inverse, BLOCK, KEY_BITS, True)
            mass_key = _search(row_ptr, V, top_p * kept, highest, inverse, BLOCK, KEY_BITS, True)
            key = tl.maximum(key, mass_key)
        if has_top_k | (top_p < 1.0):
            threshold = _from_key(key, dtype, KEY_BITS)
            threshold = tl.where(threshold == threshold, threshold, -float("inf"))
        if min_p > 0.0:
            threshold = tl.maximum(threshold, highest + temperature * tl.log(min_p))
        # Whatever the filters say, the best token stays.
        threshold = tl.minimum(threshold, highest)
    tl.store(threshold_ptr + row, threshold)
