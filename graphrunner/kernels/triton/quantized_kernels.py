"""Projections by packed weights: a kernel reads the small numbers once and widens them in registers, tile by tile.

Shape legend: B rows of x, K input width, N output width, G inputs that share a scale (GROUP; 0 is all K), J bytes of a
weight row that one load takes. A byte is one weight, or two of an INT4 group: see Note [int4 halves] in
kernels/packed_weight.py.

Widened weights are exact in bfloat16 and float16; scales multiply float32 sums, once a group. The zero of an INT4
group is taken off the sum as well: sum((q - z) x) = sum(q x) - z sum(x).

As in linear_kernels.py, weights (of norms, too) are loaded before `gdc_wait` and activations after it.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from graphrunner.kernels.triton.linear_kernels import MODE_GATED, MODE_RESIDUAL, gated

LAYOUT_INT8 = tl.constexpr(0)
LAYOUT_INT4 = tl.constexpr(1)
LAYOUT_FP8 = tl.constexpr(2)
LAYOUT_FP8_BITS = tl.constexpr(3)  # e4m3 as uint8, for cards whose Triton has no such type


@triton.jit
def widened(raw, LAYOUT: tl.constexpr, dtype: tl.constexpr):
    """Numbers of an 8-bit layout as `dtype`, exactly."""
    if LAYOUT == LAYOUT_FP8_BITS:
        # The four exponent bits land in float32's exponent, 120 too low; subnormals come out right as well.
        bits = ((raw & 127).to(tl.uint32) << 20) | ((raw & 128).to(tl.uint32) << 24)
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)
    else:
        return raw.to(dtype)


@triton.jit
def _rows_of_scale(scale_ptr, row, group, NUM_GROUPS: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """Scales (or zeros) in float32 where `row` and `group` meet; the two broadcast against each other."""
    return tl.load(scale_ptr + (row // ROW_BLOCK) * NUM_GROUPS + group).to(tl.float32)


@triton.jit
def _load_turns(data_ptr, scale_ptr, zero_ptr, row, ROW_BYTES: tl.constexpr, TURNS: tl.constexpr,
                GROUPS: tl.constexpr, J: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr,
                NUM_GROUPS: tl.constexpr, ROW_BLOCK: tl.constexpr, LAYOUT: tl.constexpr):  # fmt: skip
    """Whole weight rows [BLOCK_N, GROUPS, J] a turn, with the scales and zeros [BLOCK_N, GROUPS] of each turn."""
    IS_INT4: tl.constexpr = LAYOUT == LAYOUT_INT4
    g = tl.arange(0, GROUPS)
    j = tl.arange(0, J)
    offsets = row[:, None, None] * ROW_BYTES + g[None, :, None] * J + j[None, None, :]
    w = ()
    scales = ()
    zeros = ()
    for c in tl.static_range(TURNS):
        w = w + (tl.load(data_ptr + offsets + c * GROUPS * J),)
        group = (c * COLS // GROUP + g if GROUP > 0 else g)[None, :]
        scale = _rows_of_scale(scale_ptr, row[:, None], group, NUM_GROUPS, ROW_BLOCK)
        scales = scales + (scale,)
        zeros = zeros + (_rows_of_scale(zero_ptr, row[:, None], group, NUM_GROUPS, 1) if IS_INT4 else scale,)
    return w, scales, zeros


@triton.jit
def _row_product(w, scales, zeros, xs, his, TURNS: tl.constexpr, GROUP: tl.constexpr, LAYOUT: tl.constexpr):
    """Sum over K of one row of x times the turns of _load_turns: float32 [BLOCK_N]."""
    # Each turn's sum over J stays within a warp when it is a group; without groups it waits for the last turn.
    if GROUP > 0:
        for c in tl.static_range(TURNS):
            if LAYOUT == LAYOUT_INT4:
                products = (w[c] & 15).to(tl.float32) * xs[c][None, :, :]
                products += (w[c] >> 4).to(tl.float32) * his[c][None, :, :]
                part = tl.sum(products, 2) - zeros[c] * (tl.sum(xs[c], 1) + tl.sum(his[c], 1))[None, :]
            else:
                part = tl.sum(widened(w[c], LAYOUT, tl.float32) * xs[c][None, :, :], 2)
            if c == 0:
                total = part * scales[c]
            else:
                total += part * scales[c]
        return tl.sum(total, 1)
    else:
        products = widened(w[0], LAYOUT, tl.float32) * xs[0][None, :, :]
        for c in tl.static_range(1, TURNS):
            products += widened(w[c], LAYOUT, tl.float32) * xs[c][None, :, :]
        return tl.sum(tl.sum(products, 2) * scales[0], 1)


@triton.jit
def packed_vector_kernel(
    x_ptr, norm_weight_ptr, data_ptr, scale_ptr, zero_ptr, bias_ptr, residual_ptr, out_ptr, N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr,
    ROW_BLOCK: tl.constexpr, LAYOUT: tl.constexpr, MODE: tl.constexpr, IS_GELU: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """CUDA cores, 1 to 4 rows: a program holds BLOCK_N whole weight rows, COLS inputs a turn; COLS divides K."""
    IS_INT4: tl.constexpr = LAYOUT == LAYOUT_INT4
    SPAN: tl.constexpr = COLS if GROUP == 0 or GROUP > COLS else GROUP
    GROUPS: tl.constexpr = COLS // SPAN
    J: tl.constexpr = SPAN // 2 if IS_INT4 else SPAN
    TURNS: tl.constexpr = K // COLS
    ROW_BYTES: tl.constexpr = K // 2 if IS_INT4 else K
    NUM_GROUPS: tl.constexpr = 1 if GROUP == 0 else (K + GROUP - 1) // GROUP
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)
    w, scales, zeros = _load_turns(
        data_ptr, scale_ptr, zero_ptr, row, ROW_BYTES, TURNS, GROUPS, J, COLS, GROUP, NUM_GROUPS, ROW_BLOCK, LAYOUT
    )
    if MODE == MODE_GATED:
        u, up_scales, up_zeros = _load_turns(
            data_ptr, scale_ptr, zero_ptr, row + N, ROW_BYTES, TURNS, GROUPS, J, COLS, GROUP, NUM_GROUPS, ROW_BLOCK,
            LAYOUT,
        )  # fmt: skip
    columns = (tl.arange(0, GROUPS) * SPAN)[:, None] + tl.arange(0, J)[None, :]
    norms = ()
    hi_norms = ()
    for c in tl.static_range(TURNS if HAS_NORM else 0):
        norms = norms + (tl.load(norm_weight_ptr + c * COLS + columns).to(tl.float32),)
        if IS_INT4:
            hi_norms = hi_norms + (tl.load(norm_weight_ptr + c * COLS + J + columns).to(tl.float32),)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_real = n < N
    for b in tl.static_range(ROWS):
        xs = ()
        his = ()
        squares = tl.zeros([GROUPS, J], tl.float32)
        for c in tl.static_range(TURNS):
            x = tl.load(x_ptr + b * K + c * COLS + columns).to(tl.float32)
            if HAS_NORM:
                squares += x * x
                x = x * norms[c]
            xs = xs + (x,)
            if IS_INT4:
                # The other half of each group.
                x = tl.load(x_ptr + b * K + c * COLS + J + columns).to(tl.float32)
                if HAS_NORM:
                    squares += x * x
                    x = x * hi_norms[c]
            his = his + (x,)
        factor = 1.0
        if HAS_NORM:
            factor = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)
        y = _row_product(w, scales, zeros, xs, his, TURNS, GROUP, LAYOUT) * factor
        if HAS_BIAS:
            y += tl.load(bias_ptr + row).to(tl.float32)
        if MODE == MODE_GATED:
            up = _row_product(u, up_scales, up_zeros, xs, his, TURNS, GROUP, LAYOUT) * factor
            if HAS_BIAS:
                up += tl.load(bias_ptr + row + N).to(tl.float32)
            y = gated(y, up, IS_GELU)
        if MODE == MODE_RESIDUAL:
            y += tl.load(residual_ptr + b * N + n, mask=is_real, other=0.0).to(tl.float32)
        tl.store(out_ptr + b * N + n, y.to(out_ptr.dtype.element_ty), mask=is_real)


@triton.jit
def _finish(y, up, scale_ptr, bias_ptr, residual_ptr, out_ptr, n, b, N, ROWS, factor,
            GROUP: tl.constexpr, MODE: tl.constexpr, IS_GELU: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """Finish a [BLOCK_N, BLOCK_B] tile: row scales, norm factor, bias, gate or residual, store."""
    n_safe = tl.minimum(n, N - 1).to(tl.int64)
    if GROUP == 0:
        y = y * tl.load(scale_ptr + n_safe).to(tl.float32)[:, None]
        if MODE == MODE_GATED:
            up = up * tl.load(scale_ptr + N + n_safe).to(tl.float32)[:, None]
    y = y * factor[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n_safe).to(tl.float32)[:, None]
    if MODE == MODE_GATED:
        up = up * factor[None, :]
        if HAS_BIAS:
            up += tl.load(bias_ptr + N + n_safe).to(tl.float32)[:, None]
        y = gated(y, up, IS_GELU)
    is_real = (n < N)[:, None] & (b < ROWS)[None, :]
    offsets = b.to(tl.int64)[None, :] * N + n[:, None]
    if MODE == MODE_RESIDUAL:
        y += tl.load(residual_ptr + offsets, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=is_real)


@triton.jit
def _columns(byte, GROUP_BYTES: tl.constexpr, IS_INT4: tl.constexpr):
    """Which input a byte of a weight row multiplies; of an INT4 byte, the low four bits."""
    return byte + byte // GROUP_BYTES * GROUP_BYTES if IS_INT4 else byte


@triton.jit
def _sliced_operand(x_ptr, norm_weight_ptr, b, column, is_row, squares, K: tl.constexpr, HAS_NORM: tl.constexpr,
                    dtype: tl.constexpr):  # fmt: skip
    """x at [SLICES, BLOCK_B, J], times the norm weight, as the tensor cores take it; and the sum of squares so far."""
    x = tl.load(x_ptr + b[None, :, None] * K + column[:, None, :], mask=is_row, other=0.0)
    if HAS_NORM:
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 2)
        x = (wide * tl.load(norm_weight_ptr + column).to(tl.float32)[:, None, :]).to(dtype)
    return x, squares


@triton.jit
def _sliced_product(raw, x, hi, acc, scale_ptr, zero_ptr, row, group, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr,
                    ROW_BLOCK: tl.constexpr, LAYOUT: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """acc [SLICES, BLOCK_N, BLOCK_B] plus one load's products."""
    x_t = tl.permute(x, (0, 2, 1))
    if LAYOUT == LAYOUT_INT4:
        part = tl.dot((raw & 15).to(dtype), x_t, input_precision="ieee")
        part = tl.dot((raw >> 4).to(dtype), tl.permute(hi, (0, 2, 1)), part, input_precision="ieee")
        zero = _rows_of_scale(zero_ptr, row[None, :], group[:, None], NUM_GROUPS, 1)
        sums = tl.sum(x.to(tl.float32), 2) + tl.sum(hi.to(tl.float32), 2)
        part -= zero[:, :, None] * sums[:, None, :]
        return acc + part * _rows_of_scale(scale_ptr, row[None, :], group[:, None], NUM_GROUPS, 1)[:, :, None]
    elif GROUP > 0:
        part = tl.dot(widened(raw, LAYOUT, dtype), x_t, input_precision="ieee")
        return acc + part * _rows_of_scale(scale_ptr, row[None, :], group[:, None], NUM_GROUPS, ROW_BLOCK)[:, :, None]
    else:
        return tl.dot(widened(raw, LAYOUT, dtype), x_t, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["ROWS"])
def packed_sliced_kernel(
    x_ptr, norm_weight_ptr, data_ptr, scale_ptr, zero_ptr, bias_ptr, residual_ptr, out_ptr, N, eps, ROWS,
    K: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, J: tl.constexpr, SLICES: tl.constexpr,
    STAGES: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, LAYOUT: tl.constexpr, MODE: tl.constexpr,
    IS_GELU: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tensor cores, up to 16 rows: SLICES slices of K side by side (one a warp), added at the end.

    J divides a group's bytes, and SLICES * J a row's.
    """
    IS_INT4: tl.constexpr = LAYOUT == LAYOUT_INT4
    ROW_BYTES: tl.constexpr = K // 2 if IS_INT4 else K
    GROUP_BYTES: tl.constexpr = ROW_BYTES if GROUP == 0 else (GROUP // 2 if IS_INT4 else GROUP)
    NUM_GROUPS: tl.constexpr = 1 if GROUP == 0 else (K + GROUP - 1) // GROUP
    SLICE: tl.constexpr = ROW_BYTES // SLICES
    TURNS: tl.constexpr = SLICE // J
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)
    b = tl.arange(0, BLOCK_B)
    j = tl.arange(0, J)
    first = tl.arange(0, SLICES) * SLICE
    is_row = (b < ROWS)[None, :, None]
    offsets = first[:, None, None] + row[None, :, None] * ROW_BYTES + j[None, None, :]
    up_ptr = data_ptr + N.to(tl.int64) * ROW_BYTES
    acc = tl.zeros([SLICES, BLOCK_N, BLOCK_B], tl.float32)
    up_acc = tl.zeros([SLICES, BLOCK_N, BLOCK_B], tl.float32)
    squares = tl.zeros([SLICES, BLOCK_B], tl.float32)
    x = tl.zeros([SLICES, BLOCK_B, J], dtype)
    hi = tl.zeros([SLICES, BLOCK_B, J], dtype)
    for i in tl.range(0, TURNS, num_stages=STAGES):
        raw = tl.load(data_ptr + offsets + i * J)
        if MODE == MODE_GATED:
            raw_up = tl.load(up_ptr + offsets + i * J)
        if i == 0:
            if PDL:
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            column = _columns(first, GROUP_BYTES, IS_INT4)[:, None] + j[None, :]
            x, squares = _sliced_operand(x_ptr, norm_weight_ptr, b, column, is_row, squares, K, HAS_NORM, dtype)
            if IS_INT4:
                hi, squares = _sliced_operand(
                    x_ptr, norm_weight_ptr, b, column + GROUP_BYTES, is_row, squares, K, HAS_NORM, dtype
                )
        group = (first + i * J) // GROUP_BYTES
        acc = _sliced_product(
            raw, x, hi, acc, scale_ptr, zero_ptr, row, group, NUM_GROUPS, GROUP, ROW_BLOCK, LAYOUT, dtype
        )
        if MODE == MODE_GATED:
            up_acc = _sliced_product(
                raw_up, x, hi, up_acc, scale_ptr, zero_ptr, row + N, group, NUM_GROUPS, GROUP, ROW_BLOCK, LAYOUT,
                dtype,
            )  # fmt: skip
        if i + 1 < TURNS:
            column = _columns(first + (i + 1) * J, GROUP_BYTES, IS_INT4)[:, None] + j[None, :]
            x, squares = _sliced_operand(x_ptr, norm_weight_ptr, b, column, is_row, squares, K, HAS_NORM, dtype)
            if IS_INT4:
                hi, squares = _sliced_operand(
                    x_ptr, norm_weight_ptr, b, column + GROUP_BYTES, is_row, squares, K, HAS_NORM, dtype
                )
    factor = tl.full([BLOCK_B], 1.0, tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    _finish(
        tl.sum(acc, 0), tl.sum(up_acc, 0), scale_ptr, bias_ptr, residual_ptr, out_ptr, n, b, N, ROWS, factor, GROUP,
        MODE, IS_GELU, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def _tile_product(raw, x, hi, acc, scale_ptr, zero_ptr, row, group, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr,
                  ROW_BLOCK: tl.constexpr, LAYOUT: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """acc [BLOCK_N, BLOCK_B] plus one load's products."""
    if LAYOUT == LAYOUT_INT4:
        part = tl.dot((raw & 15).to(dtype), tl.trans(x), input_precision="ieee")
        part = tl.dot((raw >> 4).to(dtype), tl.trans(hi), part, input_precision="ieee")
        sums = tl.sum(x.to(tl.float32), 1) + tl.sum(hi.to(tl.float32), 1)
        part -= _rows_of_scale(zero_ptr, row, group, NUM_GROUPS, 1)[:, None] * sums[None, :]
        return acc + part * _rows_of_scale(scale_ptr, row, group, NUM_GROUPS, 1)[:, None]
    elif GROUP > 0:
        part = tl.dot(widened(raw, LAYOUT, dtype), tl.trans(x), input_precision="ieee")
        return acc + part * _rows_of_scale(scale_ptr, row, group, NUM_GROUPS, ROW_BLOCK)[:, None]
    else:
        return tl.dot(widened(raw, LAYOUT, dtype), tl.trans(x), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["ROWS"])
def packed_tile_kernel(
    x_ptr, data_ptr, scale_ptr, zero_ptr, bias_ptr, residual_ptr, out_ptr, N, ROWS,
    K: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, J: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, LAYOUT: tl.constexpr, MODE: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_PARTIAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tensor cores, a few hundred rows: 2-D tiles over N and over rows, SPLITS pieces of K in programs of their own.

    J divides a group's bytes, SPLITS * J a row's. No norm, no gate. IS_PARTIAL: out is float32 [SPLITS, ROWS, N] for
    finish_kernel; else SPLITS is 1 and out the result.
    """
    IS_INT4: tl.constexpr = LAYOUT == LAYOUT_INT4
    ROW_BYTES: tl.constexpr = K // 2 if IS_INT4 else K
    GROUP_BYTES: tl.constexpr = ROW_BYTES if GROUP == 0 else (GROUP // 2 if IS_INT4 else GROUP)
    NUM_GROUPS: tl.constexpr = 1 if GROUP == 0 else (K + GROUP - 1) // GROUP
    TURNS: tl.constexpr = ROW_BYTES // J // SPLITS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # Programs that share a weight tile are neighbours, so that all but the first find it in the cache.
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    row = tl.minimum(n, N - 1).to(tl.int64)
    j = tl.arange(0, J)
    is_row = (b < ROWS)[:, None]
    offsets = row[:, None] * ROW_BYTES + j[None, :]
    x_offsets = b.to(tl.int64)[:, None] * K + j[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for i in tl.range(0, TURNS, num_stages=STAGES):
        byte = (split * TURNS + i) * J
        raw = tl.load(data_ptr + offsets + byte)
        column = _columns(byte, GROUP_BYTES, IS_INT4)
        x = tl.load(x_ptr + x_offsets + column, mask=is_row, other=0.0)
        hi = x
        if IS_INT4:
            hi = tl.load(x_ptr + x_offsets + column + GROUP_BYTES, mask=is_row, other=0.0)
        acc = _tile_product(
            raw, x, hi, acc, scale_ptr, zero_ptr, row, byte // GROUP_BYTES, NUM_GROUPS, GROUP, ROW_BLOCK, LAYOUT, dtype
        )
    if IS_PARTIAL:
        place = (split * ROWS + b.to(tl.int64))[None, :] * N + n[:, None]
        tl.store(out_ptr + place, acc, mask=(n < N)[:, None] & (b < ROWS)[None, :])
    else:
        factor = tl.full([BLOCK_B], 1.0, tl.float32)
        _finish(
            acc, acc, scale_ptr, bias_ptr, residual_ptr, out_ptr, n, b, N, ROWS, factor, GROUP, MODE, False, HAS_BIAS
        )


@triton.jit
def finish_kernel(
    partial_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, N, ROWS, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, MODE: tl.constexpr, IS_GELU: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the pieces of K; then row scale, bias, gate or residual. N is the width of out; gated partials have 2 N."""
    b = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = n < N
    WIDTH = 2 * N if MODE == MODE_GATED else N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    y = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        place = (split * ROWS + b) * WIDTH + n
        y += tl.load(partial_ptr + place, mask=is_real, other=0.0)
        if MODE == MODE_GATED:
            up += tl.load(partial_ptr + place + N, mask=is_real, other=0.0)
    if GROUP == 0:
        y = y * tl.load(scale_ptr + n, mask=is_real, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=is_real, other=0.0).to(tl.float32)
    if MODE == MODE_GATED:
        if GROUP == 0:
            up = up * tl.load(scale_ptr + N + n, mask=is_real, other=0.0).to(tl.float32)
        if HAS_BIAS:
            up += tl.load(bias_ptr + N + n, mask=is_real, other=0.0).to(tl.float32)
        y = gated(y, up, IS_GELU)
    if MODE == MODE_RESIDUAL:
        y += tl.load(residual_ptr + b * N + n, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out_ptr + b * N + n, y.to(out_ptr.dtype.element_ty), mask=is_real)


@triton.jit
def dequantize_kernel(
    data_ptr, scale_ptr, zero_ptr, out_ptr, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    ROW_BLOCK: tl.constexpr, LAYOUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Widen BLOCK bytes of one weight row."""
    IS_INT4: tl.constexpr = LAYOUT == LAYOUT_INT4
    ROW_BYTES: tl.constexpr = K // 2 if IS_INT4 else K
    NUM_GROUPS: tl.constexpr = 1 if GROUP == 0 else (K + GROUP - 1) // GROUP
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = byte < ROW_BYTES
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    raw = tl.load(data_ptr + row * ROW_BYTES + byte, mask=is_real)
    group = byte // (GROUP // 2) if IS_INT4 else (byte // GROUP if GROUP > 0 else byte * 0)
    scale = tl.load(scale_ptr + row // ROW_BLOCK * NUM_GROUPS + group, mask=is_real, other=0.0).to(tl.float32)
    # Readers of an older product may still be at work on `out`: nothing is written before they are done.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if IS_INT4:
        zero = tl.load(zero_ptr + row * NUM_GROUPS + group, mask=is_real, other=0).to(tl.float32)
        column = byte + group * (GROUP // 2)
        low = ((raw & 15).to(tl.float32) - zero) * scale
        high = ((raw >> 4).to(tl.float32) - zero) * scale
        tl.store(out_ptr + row * K + column, low.to(dtype), mask=is_real)
        tl.store(out_ptr + row * K + column + GROUP // 2, high.to(dtype), mask=is_real)
    else:
        tl.store(out_ptr + row * K + byte, (widened(raw, LAYOUT, tl.float32) * scale).to(dtype), mask=is_real)


@triton.jit
def rows_to_fp8_kernel(
    x_ptr, norm_weight_ptr, out_ptr, scale_ptr, K, eps, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr
):
    """Normalise one row of x and round it to e4m3 with a scale of its own."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    is_real = k < K
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * K + k, mask=is_real, other=0.0).to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
        x = x * factor * tl.load(norm_weight_ptr + k, mask=is_real, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1.0e-30) / 448.0
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * K + k, tl.clamp(x / scale, -448.0, 448.0).to(out_ptr.dtype.element_ty), mask=is_real)
