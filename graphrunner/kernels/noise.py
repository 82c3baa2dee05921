"""Counter-based noise for sampling: a pure function of (seed, position, token), the same bits on every device.

The Triton kernels in triton/noise_kernels.py compute exactly this: integer hashing in 32 bits, then float32 additions
and multiplications that are never fused, in the same order. So a sampled token depends neither on the batch it
was sampled in nor on whether a graph, an eager step or the CPU sampled it.

Source: the integer finaliser "lowbias32" of Chris Wellons' hash-prospector; the Gumbel-max trick. The polynomial of
the logarithm is our own least-squares fit of log(1 + x) / x on [-0.3, 0.415].
"""

import torch
from torch import Tensor

MASK_32 = 0xFFFFFFFF
ROW_SALT = 0x9E3779B9
KEY_SALT = 0x85EBCA6B
MIX_A = 0x7FEB352D
MIX_B = 0x846CA68B
UNIT = 2.0**-32
NEAR_ZERO = 0.25
LARGEST_UNIFORM = 1.0 - 2.0**-24
LN_2 = 0.6931471824645996  # float32
LOG_COEFFICIENTS = (
    -0.10156925767660141,
    0.1629394292831421,
    -0.17271468043327332,
    0.1989513784646988,
    -0.24967706203460693,
    0.3333508372306824,
    -0.5000040531158447,
    0.9999999403953552,
)


def mix32(x: Tensor) -> Tensor:
    """Scramble 32-bit integers held in int64 (one to one)."""
    x = x ^ (x >> 16)
    x = (x * MIX_A) & MASK_32
    x = x ^ (x >> 15)
    x = (x * MIX_B) & MASK_32
    return x ^ (x >> 16)


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit keys for each (seed, position of the token being sampled).

    Args:
        seeds: int64 [R].
        positions: int [R]; index the sampled token will have in its sequence.

    Returns:
        Two int64 [R] of 32-bit values.
    """
    low, high = seeds & MASK_32, (seeds >> 32) & MASK_32
    first = mix32(low ^ ROW_SALT)
    first = mix32(first ^ high)
    first = mix32(first ^ (positions.to(torch.int64) & MASK_32))
    return first, mix32(first ^ KEY_SALT)


def _log1p_polynomial(x: Tensor) -> Tensor:
    """log(1 + x) for x in [-0.3, 0.415], float32."""
    total = torch.full_like(x, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        total = total * x + coefficient
    return total * x


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """(m - 1, e) with x = m * 2^e and m in [0.75, 1.5), for positive normal float32 x."""
    bits = x.view(torch.int32)
    # Adding half an octave's bits moves the cut from 1 to 1.5 (mantissa bit 22).
    exponent = ((bits + 0x00400000) >> 23) - 127
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    return mantissa - 1.0, exponent.to(torch.float32)


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Map 32 uniform bits to a standard Gumbel number.

    Args:
        bits: int64 [...] of 32-bit values.

    Returns:
        float32 [...]: -log(-log(1 - v)) with v = (bits + 0.5) / 2^32.
    """
    v = (bits.to(torch.float32) + 0.5) * UNIT
    v = torch.clamp(v, max=LARGEST_UNIFORM)
    fraction, exponent = _split(1.0 - v)
    # Near zero, log(1 - v) straight from v keeps its relative accuracy: it decides who wins a large vocabulary.
    is_near_zero = v < NEAR_ZERO
    fraction = torch.where(is_near_zero, -v, fraction)
    exponent = torch.where(is_near_zero, 0.0, exponent)
    exponential = -(_log1p_polynomial(fraction) + exponent * LN_2)
    fraction, exponent = _split(exponential)
    return -(_log1p_polynomial(fraction) + exponent * LN_2)


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise of (seed, position, token).

    Args:
        seeds: int64 [R].
        positions: int [R]; index the sampled token will have in its sequence.
        token_ids: int [V], or [R, V].

    Returns:
        float32 [R, V]; finite. Memory: a few int64 [R, V] on the way. Sync: none.
    """
    first, second = row_keys(seeds, positions)
    tokens = token_ids.to(torch.int64)
    bits = mix32(first.unsqueeze(-1) ^ tokens)
    bits = mix32((bits + second.unsqueeze(-1)) & MASK_32)
    return gumbel_from_bits(bits)
