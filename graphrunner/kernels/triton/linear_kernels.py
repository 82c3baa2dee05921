"""Fused small-batch projections: one kernel reads a weight once and does everything around it.

Shape legend: B rows of x (1 to 16), K input width, N output width, G programs.

Note [weights before wait]. Each kernel fills its software-pipelined ring of weight tiles, which depend on nothing,
*before* `gdc_wait`, loads norm weights before it too, and touches activations only after it. The activation loads sit
in an `if` of the loop's first turn so that the pipeliner does not hoist them into the ring.

Note [trigger after wait]. A kernel allows its successor to start only after its own wait. So when a kernel begins,
everything but its direct predecessor has completed, and it may read what older kernels wrote even before its wait.
Triggering at the start of a kernel was measured slower than no dependent launch at all: the successor's programs
occupy the multiprocessors while this kernel still has programs to run.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

MODE_PLAIN = tl.constexpr(0)  # out = x W^T
MODE_GATED = tl.constexpr(1)  # out = act(x Wg^T) * (x Wu^T), W = [gate; up]
MODE_RESIDUAL = tl.constexpr(2)  # out = residual + x W^T
MODE_ARGMAX = tl.constexpr(3)  # out = x W^T, and each program's best (value, index)

_NO_INDEX = tl.constexpr(2147483647)


@triton.jit
def gated(gate, up, IS_GELU: tl.constexpr):
    """act(gate) * up in float32; act is SiLU or the tanh form of GELU."""
    if IS_GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2.0 * inner) * up
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def _load_columns(ptr, column, K: tl.constexpr, IS_RAGGED: tl.constexpr):
    """A load that reads 0 past column K, where there can be such columns; column broadcasts against ptr."""
    if IS_RAGGED:
        return tl.load(ptr, mask=column < K, other=0.0)
    else:
        return tl.load(ptr)


@triton.jit
def _norm_row(norm_weight_ptr, K: tl.constexpr, BLOCK_K: tl.constexpr, HAS_NORM: tl.constexpr):
    """The norm weights in float32 chunks of BLOCK_K; nothing without a norm."""
    k = tl.arange(0, BLOCK_K)
    chunks = ()
    for c in tl.static_range((K + BLOCK_K - 1) // BLOCK_K if HAS_NORM else 0):
        column = c * BLOCK_K + k
        weight = _load_columns(norm_weight_ptr + column, column, K, (c + 1) * BLOCK_K > K)
        chunks = chunks + (weight.to(tl.float32),)
    return chunks


@triton.jit
def _activation_row(x_ptr, norm_row, eps, K: tl.constexpr, BLOCK_K: tl.constexpr, HAS_NORM: tl.constexpr):
    """One row of x in chunks of BLOCK_K, times the norm weight; and the factor that finishes the norm."""
    k = tl.arange(0, BLOCK_K)
    chunks = ()
    squares = tl.zeros([BLOCK_K], tl.float32)
    for c in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        column = c * BLOCK_K + k
        x = _load_columns(x_ptr + column, column, K, (c + 1) * BLOCK_K > K).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x = x * norm_row[c]
        chunks = chunks + (x,)
    factor = 1.0
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    return chunks, factor


@triton.jit
def _store_argmax(value_ptr, index_ptr, offset, values, indices):
    """Store the best value and, among equals, its lowest index."""
    best = tl.max(values, 0)
    tl.store(value_ptr + offset, best)
    tl.store(index_ptr + offset, tl.min(tl.where(values == best, indices, _NO_INDEX), 0))


@triton.jit
def vector_linear_kernel(
    x_ptr, norm_weight_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, value_ptr, index_ptr, N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    MODE: tl.constexpr, IS_GELU: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    TRIGGER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """CUDA-core version: a persistent program walks tiles of BLOCK_N whole weight rows; BLOCK_N divides N."""
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    WIDTH: tl.constexpr = 2 * BLOCK_N if MODE == MODE_GATED else BLOCK_N
    r = tl.arange(0, WIDTH)
    k = tl.arange(0, BLOCK_K)
    # Gate and up rows alternate, so that one split after the reduction pairs them.
    weight_row = (r % 2) * N + r // 2 if MODE == MODE_GATED else r
    xs = ()
    factors = ()
    added = ()
    best = ()
    best_tile = ()
    for _row in tl.static_range(ROWS):
        for _ in tl.static_range(CHUNKS):
            xs = xs + (tl.zeros([BLOCK_K], tl.float32),)
        factors = factors + (1.0,)
        added = added + (tl.zeros([WIDTH], out_ptr.dtype.element_ty),)
        best = best + (tl.full([WIDTH], -float("inf"), tl.float32),)
        best_tile = best_tile + (tl.zeros([WIDTH], tl.int32),)
    norm_row = _norm_row(norm_weight_ptr, K, BLOCK_K, HAS_NORM)
    for t in tl.range(pid, N // BLOCK_N, num_programs, num_stages=STAGES):
        tile_ptr = weight_ptr + (t * BLOCK_N + weight_row).to(tl.int64)[:, None] * K + k[None, :]
        w = ()
        for c in tl.static_range(CHUNKS):
            column = c * BLOCK_K + k[None, :]
            w = w + (_load_columns(tile_ptr + c * BLOCK_K, column, K, (c + 1) * BLOCK_K > K),)
        if t == pid:
            if PDL:
                tl.extra.cuda.gdc_wait()
                if TRIGGER == 1:
                    tl.extra.cuda.gdc_launch_dependents()
            xs = ()
            factors = ()
            if MODE == MODE_RESIDUAL:
                added = ()
            for b in tl.static_range(ROWS):
                row, factor = _activation_row(x_ptr + b * K, norm_row, eps, K, BLOCK_K, HAS_NORM)
                xs = xs + row
                factors = factors + (factor,)
                if MODE == MODE_RESIDUAL:
                    added = added + (tl.load(residual_ptr + b * N + t * BLOCK_N + r),)
        next_best = ()
        next_tile = ()
        for b in tl.static_range(ROWS):
            products = w[0].to(tl.float32) * xs[b * CHUNKS][None, :]
            for c in tl.static_range(1, CHUNKS):
                products += w[c].to(tl.float32) * xs[b * CHUNKS + c][None, :]
            y = tl.sum(products, 1)
            if HAS_NORM:
                y = y * factors[b]
            if HAS_BIAS:
                y += tl.load(bias_ptr + t * BLOCK_N + weight_row).to(tl.float32)
            out_tile_ptr = out_ptr + b * N + t * BLOCK_N
            if MODE == MODE_GATED:
                gate, up = tl.split(tl.reshape(y, [BLOCK_N, 2]))
                y = gated(gate, up, IS_GELU)
                tl.store(out_tile_ptr + tl.arange(0, BLOCK_N), y.to(out_ptr.dtype.element_ty))
            else:
                if MODE == MODE_RESIDUAL:
                    y += added[b].to(tl.float32)
                rounded = y.to(out_ptr.dtype.element_ty)
                tl.store(out_tile_ptr + r, rounded)
                if MODE == MODE_ARGMAX:
                    # Compared after rounding, as a reader of the stored logits would.
                    is_better = rounded.to(tl.float32) > best[b]
                    next_best = next_best + (tl.where(is_better, rounded.to(tl.float32), best[b]),)
                    next_tile = next_tile + (tl.where(is_better, t, best_tile[b]),)
        if MODE == MODE_ARGMAX:
            best = next_best
            best_tile = next_tile
        if MODE == MODE_RESIDUAL:
            if t + num_programs < N // BLOCK_N:
                added = ()
                for b in tl.static_range(ROWS):
                    added = added + (tl.load(residual_ptr + b * N + (t + num_programs) * BLOCK_N + r),)
    if MODE == MODE_ARGMAX:
        for b in tl.static_range(ROWS):
            _store_argmax(value_ptr, index_ptr, b * num_programs + pid, best[b], best_tile[b] * BLOCK_N + r)


@triton.jit
def weighted(x, norm_weight, dtype: tl.constexpr):
    """x times the norm weight along its last axis, rounded to the weight's dtype for the tensor cores."""
    return (x.to(tl.float32) * norm_weight.to(tl.float32)).to(dtype)


@triton.jit
def _real(is_row, column, K: tl.constexpr, IS_RAGGED: tl.constexpr):
    """Which of the rows' [slices, rows, columns] exist."""
    if IS_RAGGED:
        return is_row & (column < K)[:, None, :]
    else:
        return is_row


@triton.jit
def mma_epilogue(
    y, up, squares, n, b, tile, num_tiles, bias_ptr, residual_ptr, out_ptr, value_ptr, index_ptr, N, eps,
    ROWS, K: tl.constexpr, MODE: tl.constexpr, IS_GELU: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Finish a [BLOCK_N, B] tile: norm factor, bias, gate or residual, store, argmax partial."""
    if HAS_NORM:
        factor = tl.rsqrt(squares / K + eps)[None, :]
        y = y * factor
        up = up * factor
    n_safe = tl.minimum(n, N - 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n_safe).to(tl.float32)[:, None]
        if MODE == MODE_GATED:
            up += tl.load(bias_ptr + N + n_safe).to(tl.float32)[:, None]
    is_real = (n < N)[:, None] & (b < ROWS)[None, :]
    offsets = b[None, :] * N + n[:, None]
    if MODE == MODE_GATED:
        y = gated(y, up, IS_GELU)
    if MODE == MODE_RESIDUAL:
        y += tl.load(residual_ptr + offsets, mask=is_real, other=0.0).to(tl.float32)
    rounded = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, rounded, mask=is_real)
    if MODE == MODE_ARGMAX:
        values = tl.where(n[:, None] < N, rounded.to(tl.float32), -float("inf"))
        best = tl.max(values, 0)
        index = tl.min(tl.where(values == best[None, :], n[:, None], N - 1), 0)
        slot = b * num_tiles + tile
        tl.store(value_ptr + slot, best, mask=b < ROWS)
        tl.store(index_ptr + slot, index, mask=b < ROWS)


@triton.jit(do_not_specialize=["ROWS"])
def mma_linear_kernel(
    x_ptr, norm_weight_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, value_ptr, index_ptr, N, eps, ROWS,
    K: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr, STAGES: tl.constexpr, MODE: tl.constexpr, IS_GELU: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr, TRIGGER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tensor-core version with a 3-D dot: SLICES slices of K side by side (one a warp), added at the end.

    K need not be whole slices: 576 columns are 9 slices of 64, and the other 7 of 16 read zeros, which costs nothing.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.arange(0, BLOCK_B)
    k = tl.arange(0, BLOCK_K)
    s = tl.arange(0, SLICES)
    TURNS: tl.constexpr = (K + SLICES * BLOCK_K - 1) // (SLICES * BLOCK_K)
    SLICE: tl.constexpr = TURNS * BLOCK_K
    IS_RAGGED: tl.constexpr = SLICES * SLICE != K
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    is_row = (b < ROWS)[None, :, None]
    column = s[:, None] * SLICE + k[None, :]
    row = tl.minimum(n, N - 1).to(tl.int64)
    weight_offsets = row[None, :, None] * K + column[:, None, :]
    x_offsets = b[None, :, None] * K + column[:, None, :]
    up_ptr = weight_ptr + N.to(tl.int64) * K
    acc = tl.zeros([SLICES, BLOCK_N, BLOCK_B], tl.float32)
    up_acc = tl.zeros([SLICES, BLOCK_N, BLOCK_B], tl.float32)
    squares = tl.zeros([SLICES, BLOCK_B], tl.float32)
    x = tl.zeros([SLICES, BLOCK_B, BLOCK_K], dtype)
    g = tl.zeros([SLICES, BLOCK_K], tl.float32)
    if HAS_NORM:
        g = _load_columns(norm_weight_ptr + column, column, K, IS_RAGGED).to(tl.float32)
    for i in tl.range(0, TURNS, num_stages=STAGES):
        here = column + i * BLOCK_K
        w = _load_columns(weight_ptr + weight_offsets + i * BLOCK_K, here[:, None, :], K, IS_RAGGED)
        if MODE == MODE_GATED:
            w_up = _load_columns(up_ptr + weight_offsets + i * BLOCK_K, here[:, None, :], K, IS_RAGGED)
        if i == 0:
            if PDL:
                tl.extra.cuda.gdc_wait()
                if TRIGGER == 1:
                    tl.extra.cuda.gdc_launch_dependents()
            x = tl.load(x_ptr + x_offsets, mask=_real(is_row, here, K, IS_RAGGED), other=0.0)
        operand = x
        if HAS_NORM:
            squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 2)
            operand = weighted(x, g[:, None, :], dtype)
        operand = tl.permute(operand, (0, 2, 1))
        if i + 1 < TURNS:
            after = here + BLOCK_K
            x = tl.load(x_ptr + x_offsets + (i + 1) * BLOCK_K, mask=_real(is_row, after, K, IS_RAGGED), other=0.0)
            if HAS_NORM:
                g = _load_columns(norm_weight_ptr + after, after, K, IS_RAGGED).to(tl.float32)
        acc = tl.dot(w, operand, acc, input_precision="ieee")
        if MODE == MODE_GATED:
            up_acc = tl.dot(w_up, operand, up_acc, input_precision="ieee")
    mma_epilogue(
        tl.sum(acc, 0), tl.sum(up_acc, 0), tl.sum(squares, 0), n, b, tl.program_id(0), tl.num_programs(0), bias_ptr,
        residual_ptr, out_ptr, value_ptr, index_ptr, N, eps, ROWS, K, MODE, IS_GELU, HAS_NORM, HAS_BIAS,
    )  # fmt: skip
