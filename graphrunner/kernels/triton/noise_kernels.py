"""The noise of kernels/noise.py, inside kernels: same integers, same float32 operations in the same order.

Kernels that call these are launched with enable_fp_fusion=False, or a fused multiply-add would change the last bit.
"""

import triton
import triton.language as tl

from graphrunner.kernels import noise

_ROW_SALT = tl.constexpr(noise.ROW_SALT)
_KEY_SALT = tl.constexpr(noise.KEY_SALT)
_MIX_A = tl.constexpr(noise.MIX_A)
_MIX_B = tl.constexpr(noise.MIX_B)
_UNIT = tl.constexpr(noise.UNIT)
_NEAR_ZERO = tl.constexpr(noise.NEAR_ZERO)
_LARGEST_UNIFORM = tl.constexpr(noise.LARGEST_UNIFORM)
_LN_2 = tl.constexpr(noise.LN_2)
_C0 = tl.constexpr(noise.LOG_COEFFICIENTS[0])
_C1 = tl.constexpr(noise.LOG_COEFFICIENTS[1])
_C2 = tl.constexpr(noise.LOG_COEFFICIENTS[2])
_C3 = tl.constexpr(noise.LOG_COEFFICIENTS[3])
_C4 = tl.constexpr(noise.LOG_COEFFICIENTS[4])
_C5 = tl.constexpr(noise.LOG_COEFFICIENTS[5])
_C6 = tl.constexpr(noise.LOG_COEFFICIENTS[6])
_C7 = tl.constexpr(noise.LOG_COEFFICIENTS[7])


@triton.jit
def mix32(x):
    """noise.mix32 on uint32."""
    x = x ^ (x >> 16)
    x = x * _MIX_A
    x = x ^ (x >> 15)
    x = x * _MIX_B
    return (x ^ (x >> 16)).to(tl.uint32)


@triton.jit
def row_keys(seed, position):
    """noise.row_keys of one row: two uint32."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    first = mix32((low ^ _ROW_SALT).to(tl.uint32))
    first = mix32(first ^ high)
    first = mix32(first ^ position.to(tl.uint32))
    return first, mix32((first ^ _KEY_SALT).to(tl.uint32))


@triton.jit
def _log1p_polynomial(x):
    total = x * _C0 + _C1
    total = total * x + _C2
    total = total * x + _C3
    total = total * x + _C4
    total = total * x + _C5
    total = total * x + _C6
    total = total * x + _C7
    return total * x


@triton.jit
def _split(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits + 0x00400000) >> 23) - 127
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    return mantissa - 1.0, exponent.to(tl.float32)


@triton.jit
def gumbel(first, second, token):
    """noise.gumbel_noise for the keys of a row and int32 token ids."""
    bits = mix32(first ^ token.to(tl.uint32))
    bits = mix32((bits + second).to(tl.uint32))
    v = (bits.to(tl.float32) + 0.5) * _UNIT
    v = tl.minimum(v, _LARGEST_UNIFORM)
    fraction, exponent = _split(1.0 - v)
    is_near_zero = v < _NEAR_ZERO
    fraction = tl.where(is_near_zero, -v, fraction)
    exponent = tl.where(is_near_zero, 0.0, exponent)
    exponential = -(_log1p_polynomial(fraction) + exponent * _LN_2)
    fraction, exponent = _split(exponential)
    return -(_log1p_polynomial(fraction) + exponent * _LN_2)
