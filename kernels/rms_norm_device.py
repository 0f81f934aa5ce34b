"""Triton kernels for RMSNorm with an optional residual add, forward and backward.

A program works on tiles of ROWS rows by BLOCK columns (BLOCK >= N); the ``*_wide`` kernels walk a
row in chunks of BLOCK < N columns instead. Widths are compile-time constants, the number of rows
M never is. An absent tensor is passed as None, which removes its code.

Row strides arrive divided by STRIDE_UNIT: the factor inside the kernel lets the compiler prove
that rows begin at 16-byte boundaries. Row bases are 64-bit scalars, offsets in a tile 32-bit.
"""

import triton
import triton.language as tl

_FORWARD_RUNTIME = ["M", "x_stride", "residual_stride"]
_BACKWARD_RUNTIME = ["M", "dy_stride", "dy2_stride", "dy3_stride", "h_stride", "dres_stride"]


@triton.jit
def _load(pointers, mask, EVICTION: tl.constexpr):
    if mask is None:
        values = tl.load(pointers, eviction_policy=EVICTION)
    else:
        values = tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICTION)
    return values


@triton.jit
def _row_mask(first_row, M, ROWS: tl.constexpr):
    if ROWS == 1:  # noqa: SIM108 (Triton 3.6 cannot return a conditional None)
        mask = None
    else:
        mask = first_row + tl.arange(0, ROWS)[:, None] < M
    return mask


@triton.jit
def _column_mask(columns, N: tl.constexpr, BLOCK: tl.constexpr):
    if N % BLOCK == 0:  # noqa: SIM108
        mask = None
    else:
        mask = columns < N
    return mask


@triton.jit
def _both(row_mask, column_mask):
    if row_mask is None:
        mask = column_mask
    elif column_mask is None:
        mask = row_mask
    else:
        mask = row_mask & column_mask
    return mask


@triton.jit
def _read(
    base,
    stride,
    first_row,
    columns,
    mask,
    ROWS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """ROWS rows of a tensor with a row stride."""
    start = base + tl.cast(first_row, tl.int64) * tl.cast(stride, tl.int64) * STRIDE_UNIT
    if ROWS == 1:
        pointers = start + columns
    else:
        step = tl.cast(stride, tl.int32) * STRIDE_UNIT
        pointers = start + (tl.arange(0, ROWS)[:, None] * step + columns)
    return _load(pointers, mask, EVICTION)


@triton.jit
def _packed(base, first_row, columns, N: tl.constexpr, ROWS: tl.constexpr):
    """Pointers to ROWS rows of a contiguous tensor."""
    return base + tl.cast(first_row, tl.int64) * N + (tl.arange(0, ROWS)[:, None] * N + columns)


@triton.jit
def _read_weight(weight, columns, mask, ROWS: tl.constexpr):
    if weight is None:
        values = None
    else:
        # indexed like the tile, so that the values are loaded in the tile's layout
        pointers = weight + (tl.arange(0, ROWS)[:, None] * 0 + columns)
        values = _load(pointers, mask, "evict_last")
    return values


@triton.jit
def _rounded_sum(a, b, DTYPE: tl.constexpr):
    return (a.to(tl.float32) + b.to(tl.float32)).to(DTYPE)


@triton.jit
def _reciprocal_rms(square_sum, eps, N: tl.constexpr):
    # eps may arrive as fp64, which would promote all that follows
    return tl.rsqrt(square_sum / N + tl.cast(eps, tl.float32))


@triton.jit
def _scale(values, weight, WEIGHT_OFFSET: tl.constexpr):
    """values * (weight_offset + weight) in fp32."""
    if weight is not None:
        factor = weight.to(tl.float32)
        if WEIGHT_OFFSET != 0.0:
            factor = factor + WEIGHT_OFFSET
        values = values * factor
    return values


@triton.jit
def _normalise(h, rstd, weight, WEIGHT_OFFSET: tl.constexpr, UNIT_DTYPE: tl.constexpr):
    unit = h * rstd
    if UNIT_DTYPE is not None:
        unit = unit.to(UNIT_DTYPE).to(tl.float32)
    return _scale(unit, weight, WEIGHT_OFFSET)


@triton.jit
def _read_gradient(
    dy,
    dy2,
    dy3,
    dy_stride,
    dy2_stride,
    dy3_stride,
    first_row,
    columns,
    mask,
    ROWS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """The sum of one to three gradients, rounded to their dtype after each add; then in fp32."""
    DTYPE: tl.constexpr = dy.dtype.element_ty
    total = _read(dy, dy_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, EVICTION)
    if dy2 is not None:
        more = _read(dy2, dy2_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, EVICTION)
        total = _rounded_sum(total, more, DTYPE)
    if dy3 is not None:
        more = _read(dy3, dy3_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, EVICTION)
        total = _rounded_sum(total, more, DTYPE)
    return total.to(tl.float32)


@triton.jit(do_not_specialize=_FORWARD_RUNTIME)
def forward(
    x,
    residual,
    weight,
    y,
    h,
    rstd,
    M,
    x_stride,
    residual_stride,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    UNIT_DTYPE: tl.constexpr,
):
    first_row = tl.program_id(0) * ROWS
    columns = tl.arange(0, BLOCK)[None, :]
    row_mask = _row_mask(first_row, M, ROWS)
    column_mask = _column_mask(columns, N, BLOCK)
    mask = _both(row_mask, column_mask)

    # all loads stand before the reduction, so that none of them waits for it
    total = _read(x, x_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first")
    if residual is not None:
        more = _read(
            residual, residual_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first"
        )
    gain = _read_weight(weight, columns, column_mask, ROWS)

    if residual is not None:
        total = _rounded_sum(total, more, h.dtype.element_ty)
        tl.store(_packed(h, first_row, columns, N, ROWS), total, mask=mask)
    values = total.to(tl.float32)
    row_rstd = _reciprocal_rms(tl.sum(values * values, axis=1, keep_dims=True), eps, N)
    tl.store(rstd + first_row + tl.arange(0, ROWS)[:, None], row_rstd, mask=row_mask)
    result = _normalise(values, row_rstd, gain, WEIGHT_OFFSET, UNIT_DTYPE)
    y_rows = _packed(y, first_row, columns, N, ROWS)
    tl.store(y_rows, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _end(M, N: tl.constexpr):
    # N, but the compiler does not know: it would unroll the chunks and run out of registers
    return tl.where(M > 0, N, 0)


@triton.jit(do_not_specialize=_FORWARD_RUNTIME)
def forward_wide(
    x,
    residual,
    weight,
    y,
    h,
    rstd,
    M,
    x_stride,
    residual_stride,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    UNIT_DTYPE: tl.constexpr,
):
    """One row a program, read twice in chunks: the second time from the cache."""
    row = tl.program_id(0)
    end = _end(M, N)
    squares = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        mask = _column_mask(columns, N, BLOCK)
        total = _read(x, x_stride, row, columns, mask, 1, STRIDE_UNIT, "")
        if residual is not None:
            more = _read(residual, residual_stride, row, columns, mask, 1, STRIDE_UNIT, "")
            total = _rounded_sum(total, more, h.dtype.element_ty)
            tl.store(_packed(h, row, columns, N, 1), total, mask=mask)
        values = total.to(tl.float32)
        squares += values * values
    row_rstd = _reciprocal_rms(tl.sum(squares, axis=1, keep_dims=True), eps, N)
    tl.store(rstd + row + tl.arange(0, 1)[:, None], row_rstd)

    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        mask = _column_mask(columns, N, BLOCK)
        gain = _read_weight(weight, columns, mask, 1)
        # summed again rather than read back from h, which would need a barrier
        total = _read(x, x_stride, row, columns, mask, 1, STRIDE_UNIT, "")
        if residual is not None:
            more = _read(residual, residual_stride, row, columns, mask, 1, STRIDE_UNIT, "")
            total = _rounded_sum(total, more, h.dtype.element_ty)
        result = _normalise(total.to(tl.float32), row_rstd, gain, WEIGHT_OFFSET, UNIT_DTYPE)
        y_rows = _packed(y, row, columns, N, 1)
        tl.store(y_rows, result.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_BACKWARD_RUNTIME)
def backward(
    dy,
    dy2,
    dy3,
    h,
    weight,
    rstd,
    dres,
    dh,
    partials,
    M,
    dy_stride,
    dy2_stride,
    dy3_stride,
    h_stride,
    dres_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
):
    """dh, and where `partials` [programs, N] is given, this program's share of dweight."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)[None, :]
    column_mask = _column_mask(columns, N, BLOCK)
    gain = _read_weight(weight, columns, column_mask, ROWS)
    if partials is not None:
        dweight = tl.zeros([ROWS, BLOCK], tl.float32)

    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        first_row = tile * ROWS
        row_mask = _row_mask(first_row, M, ROWS)
        mask = _both(row_mask, column_mask)
        gradient = _read_gradient(
            dy, dy2, dy3, dy_stride, dy2_stride, dy3_stride,
            first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first",
        )  # fmt: skip
        values = _read(h, h_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first")
        # before the reduction, which would otherwise delay this load
        if dres is not None:
            extra = _read(
                dres, dres_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first"
            )
        row_rstd = _load(rstd + first_row + tl.arange(0, ROWS)[:, None], row_mask, "")

        x_hat = values.to(tl.float32) * row_rstd
        if partials is not None:
            dweight += gradient * x_hat
        scaled = _scale(gradient, gain, WEIGHT_OFFSET)
        c = tl.sum(x_hat * scaled, axis=1, keep_dims=True) / N
        result = (scaled - x_hat * c) * row_rstd
        if dres is not None:
            result += extra.to(tl.float32)
        dh_rows = _packed(dh, first_row, columns, N, ROWS)
        tl.store(dh_rows, result.to(dh.dtype.element_ty), mask=mask)

    if partials is not None:
        share = tl.sum(dweight, axis=0, keep_dims=True)
        share_row = _packed(partials, program, columns, N, 1)
        tl.store(share_row, share, mask=column_mask, eviction_policy="evict_last")


@triton.jit(do_not_specialize=_BACKWARD_RUNTIME)
def backward_wide(
    dy,
    dy2,
    dy3,
    h,
    weight,
    rstd,
    dres,
    dh,
    partials,
    M,
    dy_stride,
    dy2_stride,
    dy3_stride,
    h_stride,
    dres_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
):
    """One row at a time, in chunks; dweight gathers in `partials`, as registers cannot hold it."""
    program = tl.program_id(0)
    end = _end(M, N)
    for row in range(program, M, tl.num_programs(0)):
        row_rstd = _load(rstd + row + tl.arange(0, 1)[:, None], None, "")
        products = tl.zeros([1, BLOCK], tl.float32)
        for start in tl.range(0, end, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)[None, :]
            mask = _column_mask(columns, N, BLOCK)
            gain = _read_weight(weight, columns, mask, 1)
            gradient = _read_gradient(
                dy, dy2, dy3, dy_stride, dy2_stride, dy3_stride,
                row, columns, mask, 1, STRIDE_UNIT, "",
            )  # fmt: skip
            values = _read(h, h_stride, row, columns, mask, 1, STRIDE_UNIT, "")
            x_hat = values.to(tl.float32) * row_rstd
            products += x_hat * _scale(gradient, gain, WEIGHT_OFFSET)
        c = tl.sum(products, axis=1, keep_dims=True) / N

        # the row before has stored its partials; only then may this one read them
        tl.debug_barrier()
        for start in tl.range(0, end, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)[None, :]
            mask = _column_mask(columns, N, BLOCK)
            gain = _read_weight(weight, columns, mask, 1)
            gradient = _read_gradient(
                dy, dy2, dy3, dy_stride, dy2_stride, dy3_stride,
                row, columns, mask, 1, STRIDE_UNIT, "evict_first",
            )  # fmt: skip
            values = _read(h, h_stride, row, columns, mask, 1, STRIDE_UNIT, "evict_first")
            x_hat = values.to(tl.float32) * row_rstd
            result = (_scale(gradient, gain, WEIGHT_OFFSET) - x_hat * c) * row_rstd
            if dres is not None:
                extra = _read(dres, dres_stride, row, columns, mask, 1, STRIDE_UNIT, "evict_first")
                result += extra.to(tl.float32)
            dh_rows = _packed(dh, row, columns, N, 1)
            tl.store(dh_rows, result.to(dh.dtype.element_ty), mask=mask)
            if partials is not None:
                share_row = _packed(partials, program, columns, N, 1)
                share = gradient * x_hat
                if row != program:
                    share += _load(share_row, mask, "")
                tl.store(share_row, share, mask=mask, eviction_policy="evict_last")


@triton.jit(do_not_specialize=["P"])
def finalize(
    partials,
    dweight,
    P,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dweight [N] from partials [P, N], always in the same order."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    column_mask = _column_mask(columns, N, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first_row in range(0, P, ROWS):
        row_mask = first_row + tl.arange(0, ROWS)[:, None] < P
        rows = _packed(partials, first_row, columns, N, ROWS)
        total += _load(rows, _both(row_mask, column_mask), "evict_first")
    result = tl.sum(total, axis=0, keep_dims=True)
    tl.store(dweight + columns, result.to(dweight.dtype.element_ty), mask=column_mask)
