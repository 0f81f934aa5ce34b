"""Triton kernels for RMSNorm with an optional residual add, forward and backward.

A program works on tiles of ROWS rows by BLOCK columns (BLOCK >= N); the ``*_wide`` kernels walk a
row in chunks of BLOCK < N columns instead. Widths are compile-time constants, the number of rows
M never is. An absent tensor is passed as None, which removes its code.
"""

import triton
import triton.language as tl

from fxfuse.kernels.tile_device import (
    add_rounded,
    hide,
    load,
    mask_both,
    mask_columns,
    mask_rows,
    normalise,
    point,
    read,
    read_gradient,
    read_weight,
    reciprocal_rms,
    round_to,
    scale,
    write,
)

_FORWARD_RUNTIME = ["M", "x_stride", "residual_stride"]
_BACKWARD_RUNTIME = ["M", "dy_stride", "dy2_stride", "dy3_stride", "h_stride", "dres_stride"]


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
    RSTD_DTYPE: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    UNIT_DTYPE: tl.constexpr,
):
    first_row = tl.program_id(0) * ROWS
    columns = tl.arange(0, BLOCK)[None, :]
    row_mask = mask_rows(first_row, M, ROWS)
    column_mask = mask_columns(columns, N, BLOCK)
    mask = mask_both(row_mask, column_mask)

    # all loads stand before the reduction, so that none of them waits for it
    total = read(x, x_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first")
    if residual is not None:
        more = read(
            residual, residual_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first"
        )
    gain = read_weight(weight, columns, column_mask, ROWS)

    if residual is not None:
        total = add_rounded(total, more, h.dtype.element_ty)
        tl.store(point(h, first_row, columns, N, ROWS), total, mask=mask)
    values = total.to(tl.float32)
    row_rstd = reciprocal_rms(tl.sum(values * values, axis=1, keep_dims=True), eps, N)
    tl.store(rstd + first_row + tl.arange(0, ROWS)[:, None], row_rstd, mask=row_mask)
    row_rstd = round_to(row_rstd, RSTD_DTYPE)
    result = scaled(values, row_rstd, gain, WEIGHT_OFFSET, SCALE_DTYPE, UNIT_DTYPE)
    y_rows = point(y, first_row, columns, N, ROWS)
    tl.store(y_rows, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def scaled(
    h, rstd, weight, WEIGHT_OFFSET: tl.constexpr, SCALE_DTYPE: tl.constexpr,
    UNIT_DTYPE: tl.constexpr,
):  # fmt: skip
    if SCALE_DTYPE is not None:
        result = h * round_to(scale(rstd, weight, WEIGHT_OFFSET), SCALE_DTYPE)
    else:
        result = normalise(h, rstd, weight, WEIGHT_OFFSET, UNIT_DTYPE)
    return result


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
    RSTD_DTYPE: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    UNIT_DTYPE: tl.constexpr,
):
    """One row a program, read twice in chunks: the second time from the cache."""
    row = tl.program_id(0)
    end = hide(M, N)
    squares = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        mask = mask_columns(columns, N, BLOCK)
        total = read(x, x_stride, row, columns, mask, 1, STRIDE_UNIT, "")
        if residual is not None:
            more = read(residual, residual_stride, row, columns, mask, 1, STRIDE_UNIT, "")
            total = add_rounded(total, more, h.dtype.element_ty)
            tl.store(point(h, row, columns, N, 1), total, mask=mask)
        values = total.to(tl.float32)
        squares += values * values
    row_rstd = reciprocal_rms(tl.sum(squares, axis=1, keep_dims=True), eps, N)
    tl.store(rstd + row + tl.arange(0, 1)[:, None], row_rstd)
    row_rstd = round_to(row_rstd, RSTD_DTYPE)

    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        mask = mask_columns(columns, N, BLOCK)
        gain = read_weight(weight, columns, mask, 1)
        # summed again rather than read back from h, which would need a barrier
        total = read(x, x_stride, row, columns, mask, 1, STRIDE_UNIT, "")
        if residual is not None:
            more = read(residual, residual_stride, row, columns, mask, 1, STRIDE_UNIT, "")
            total = add_rounded(total, more, h.dtype.element_ty)
        values = total.to(tl.float32)
        result = scaled(values, row_rstd, gain, WEIGHT_OFFSET, SCALE_DTYPE, UNIT_DTYPE)
        y_rows = point(y, row, columns, N, 1)
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
    column_mask = mask_columns(columns, N, BLOCK)
    gain = read_weight(weight, columns, column_mask, ROWS)
    if partials is not None:
        dweight = tl.zeros([ROWS, BLOCK], tl.float32)

    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        first_row = tile * ROWS
        row_mask = mask_rows(first_row, M, ROWS)
        mask = mask_both(row_mask, column_mask)
        gradient = read_gradient(
            dy, dy2, dy3, dy_stride, dy2_stride, dy3_stride,
            first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first",
        )  # fmt: skip
        values = read(h, h_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first")
        # before the reduction, which would otherwise delay this load
        if dres is not None:
            extra = read(
                dres, dres_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first"
            )
        row_rstd = load(rstd + first_row + tl.arange(0, ROWS)[:, None], row_mask, "")

        x_hat = values.to(tl.float32) * row_rstd
        if partials is not None:
            dweight += gradient * x_hat
        scaled = scale(gradient, gain, WEIGHT_OFFSET)
        c = tl.sum(x_hat * scaled, axis=1, keep_dims=True) / N
        result = (scaled - x_hat * c) * row_rstd
        if dres is not None:
            result += extra.to(tl.float32)
        dh_rows = point(dh, first_row, columns, N, ROWS)
        tl.store(dh_rows, result.to(dh.dtype.element_ty), mask=mask)

    if partials is not None:
        share = tl.sum(dweight, axis=0, keep_dims=True)
        share_row = point(partials, program, columns, N, 1)
        tl.store(share_row, share, mask=column_mask, eviction_policy="evict_last")


@triton.jit(do_not_specialize=_BACKWARD_RUNTIME)
def backward_chunks(
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
    """One row at a time, in chunks that are read again, from the cache; dweight in registers."""
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    end = hide(M, N)
    shares = ()
    if partials is not None:
        for _ in tl.static_range(CHUNKS):
            shares = shares + (tl.zeros([1, BLOCK], tl.float32),)  # noqa: RUF005

    for row in range(program, M, tl.num_programs(0)):
        row_rstd = load(rstd + row + tl.arange(0, 1)[:, None], None, "")
        products = tl.zeros([1, BLOCK], tl.float32)
        for start in tl.range(0, end, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)[None, :]
            mask = mask_columns(columns, N, BLOCK)
            gain = read_weight(weight, columns, mask, 1)
            gradient = read_gradient(
                dy, dy2, dy3, dy_stride, dy2_stride, dy3_stride,
                row, columns, mask, 1, STRIDE_UNIT, "",
            )  # fmt: skip
            values = read(h, h_stride, row, columns, mask, 1, STRIDE_UNIT, "")
            x_hat = values.to(tl.float32) * row_rstd
            products += x_hat * scale(gradient, gain, WEIGHT_OFFSET)
        c = tl.sum(products, axis=1, keep_dims=True) / N

        gathered = ()
        for chunk in tl.static_range(CHUNKS):
            columns = chunk * BLOCK + tl.arange(0, BLOCK)[None, :]
            mask = mask_columns(columns, N, BLOCK)
            gain = read_weight(weight, columns, mask, 1)
            gradient = read_gradient(
                dy, dy2, dy3, dy_stride, dy2_stride, dy3_stride,
                row, columns, mask, 1, STRIDE_UNIT, "evict_first",
            )  # fmt: skip
            values = read(h, h_stride, row, columns, mask, 1, STRIDE_UNIT, "evict_first")
            x_hat = values.to(tl.float32) * row_rstd
            result = (scale(gradient, gain, WEIGHT_OFFSET) - x_hat * c) * row_rstd
            if dres is not None:
                extra = read(dres, dres_stride, row, columns, mask, 1, STRIDE_UNIT, "evict_first")
                result += extra.to(tl.float32)
            write(dh, row, columns, result, mask, N, 1)
            if partials is not None:
                gathered = gathered + (shares[chunk] + gradient * x_hat,)  # noqa: RUF005
        shares = gathered

    if partials is not None:
        for chunk in tl.static_range(CHUNKS):
            columns = chunk * BLOCK + tl.arange(0, BLOCK)[None, :]
            mask = mask_columns(columns, N, BLOCK)
            write(partials, program, columns, shares[chunk], mask, N, 1)


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
    end = hide(M, N)
    for row in range(program, M, tl.num_programs(0)):
        row_rstd = load(rstd + row + tl.arange(0, 1)[:, None], None, "")
        products = tl.zeros([1, BLOCK], tl.float32)
        for start in tl.range(0, end, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)[None, :]
            mask = mask_columns(columns, N, BLOCK)
            gain = read_weight(weight, columns, mask, 1)
            gradient = read_gradient(
                dy, dy2, dy3, dy_stride, dy2_stride, dy3_stride,
                row, columns, mask, 1, STRIDE_UNIT, "",
            )  # fmt: skip
            values = read(h, h_stride, row, columns, mask, 1, STRIDE_UNIT, "")
            x_hat = values.to(tl.float32) * row_rstd
            products += x_hat * scale(gradient, gain, WEIGHT_OFFSET)
        c = tl.sum(products, axis=1, keep_dims=True) / N

        # the row before has stored its partials; only then may this one read them
        tl.debug_barrier()
        for start in tl.range(0, end, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)[None, :]
            mask = mask_columns(columns, N, BLOCK)
            gain = read_weight(weight, columns, mask, 1)
            gradient = read_gradient(
                dy, dy2, dy3, dy_stride, dy2_stride, dy3_stride,
                row, columns, mask, 1, STRIDE_UNIT, "evict_first",
            )  # fmt: skip
            values = read(h, h_stride, row, columns, mask, 1, STRIDE_UNIT, "evict_first")
            x_hat = values.to(tl.float32) * row_rstd
            result = (scale(gradient, gain, WEIGHT_OFFSET) - x_hat * c) * row_rstd
            if dres is not None:
                extra = read(dres, dres_stride, row, columns, mask, 1, STRIDE_UNIT, "evict_first")
                result += extra.to(tl.float32)
            dh_rows = point(dh, row, columns, N, 1)
            tl.store(dh_rows, result.to(dh.dtype.element_ty), mask=mask)
            if partials is not None:
                share_row = point(partials, program, columns, N, 1)
                share = gradient * x_hat
                if row != program:
                    share += load(share_row, mask, "")
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
    column_mask = mask_columns(columns, N, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first_row in range(0, P, ROWS):
        row_mask = first_row + tl.arange(0, ROWS)[:, None] < P
        rows = point(partials, first_row, columns, N, ROWS)
        total += load(rows, mask_both(row_mask, column_mask), "evict_first")
    result = tl.sum(total, axis=0, keep_dims=True)
    tl.store(dweight + columns, result.to(dweight.dtype.element_ty), mask=column_mask)
