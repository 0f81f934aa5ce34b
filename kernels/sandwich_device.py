"""Triton kernels for a norm, a residual add and the norm of the sum, forward and backward.

A program works on tiles of ROWS rows by BLOCK columns (BLOCK >= N); `forward_wide` walks a row in
chunks of BLOCK < N columns instead. All is computed in fp32. A constant ``*_DTYPE`` is the dtype
that a value is rounded to, or None; h is rounded to its own.
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
_BACKWARD_RUNTIME = [
    "M", "dy_stride", "dy2_stride", "dy3_stride", "x_stride", "h_stride", "dres_stride",
]  # fmt: skip


@triton.jit
def _sum(
    values,
    residual,
    rstd,
    weight,
    WEIGHT_OFFSET: tl.constexpr,
    UNIT_DTYPE: tl.constexpr,
    SCALED_DTYPE: tl.constexpr,
    NORM_DTYPE: tl.constexpr,
    H_DTYPE: tl.constexpr,
):
    """The residual plus the norm of fp32 values, rounded; then in fp32."""
    normed = round_to(normalise(values, rstd, weight, WEIGHT_OFFSET, UNIT_DTYPE), SCALED_DTYPE)
    return add_rounded(residual, round_to(normed, NORM_DTYPE), H_DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=_FORWARD_RUNTIME)
def forward(
    x,
    residual,
    weight1,
    weight2,
    y,
    h,
    rstd1,
    rstd2,
    M,
    x_stride,
    residual_stride,
    eps1,
    eps2,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WEIGHT_OFFSET1: tl.constexpr,
    WEIGHT_OFFSET2: tl.constexpr,
    UNIT_DTYPE1: tl.constexpr,
    SCALED_DTYPE1: tl.constexpr,
    NORM_DTYPE1: tl.constexpr,
    UNIT_DTYPE2: tl.constexpr,
    SCALED_DTYPE2: tl.constexpr,
):
    first_row = tl.program_id(0) * ROWS
    columns = tl.arange(0, BLOCK)[None, :]
    row_mask = mask_rows(first_row, M, ROWS)
    column_mask = mask_columns(columns, N, BLOCK)
    mask = mask_both(row_mask, column_mask)

    # all loads stand before the reductions, so that none of them waits for one
    values = read(x, x_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first")
    more = read(
        residual, residual_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first"
    )
    gain1 = read_weight(weight1, columns, column_mask, ROWS)
    gain2 = read_weight(weight2, columns, column_mask, ROWS)

    values = values.to(tl.float32)
    row_rstd1 = reciprocal_rms(tl.sum(values * values, axis=1, keep_dims=True), eps1, N)
    tl.store(rstd1 + first_row + tl.arange(0, ROWS)[:, None], row_rstd1, mask=row_mask)
    total = _sum(
        values, more, row_rstd1, gain1, WEIGHT_OFFSET1,
        UNIT_DTYPE1, SCALED_DTYPE1, NORM_DTYPE1, h.dtype.element_ty,
    )  # fmt: skip
    write(h, first_row, columns, total, mask, N, ROWS)
    row_rstd2 = reciprocal_rms(tl.sum(total * total, axis=1, keep_dims=True), eps2, N)
    tl.store(rstd2 + first_row + tl.arange(0, ROWS)[:, None], row_rstd2, mask=row_mask)
    result = normalise(total, row_rstd2, gain2, WEIGHT_OFFSET2, UNIT_DTYPE2)
    write(y, first_row, columns, round_to(result, SCALED_DTYPE2), mask, N, ROWS)


@triton.jit(do_not_specialize=_FORWARD_RUNTIME)
def forward_wide(
    x,
    residual,
    weight1,
    weight2,
    y,
    h,
    rstd1,
    rstd2,
    M,
    x_stride,
    residual_stride,
    eps1,
    eps2,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WEIGHT_OFFSET1: tl.constexpr,
    WEIGHT_OFFSET2: tl.constexpr,
    UNIT_DTYPE1: tl.constexpr,
    SCALED_DTYPE1: tl.constexpr,
    NORM_DTYPE1: tl.constexpr,
    UNIT_DTYPE2: tl.constexpr,
    SCALED_DTYPE2: tl.constexpr,
):
    """One row a program, read three times in chunks: after the first time from the cache."""
    row = tl.program_id(0)
    end = hide(M, N)
    squares = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        mask = mask_columns(columns, N, BLOCK)
        values = read(x, x_stride, row, columns, mask, 1, STRIDE_UNIT, "").to(tl.float32)
        squares += values * values
    row_rstd1 = reciprocal_rms(tl.sum(squares, axis=1, keep_dims=True), eps1, N)
    tl.store(rstd1 + row + tl.arange(0, 1)[:, None], row_rstd1)

    squares = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        mask = mask_columns(columns, N, BLOCK)
        gain = read_weight(weight1, columns, mask, 1)
        values = read(x, x_stride, row, columns, mask, 1, STRIDE_UNIT, "").to(tl.float32)
        more = read(residual, residual_stride, row, columns, mask, 1, STRIDE_UNIT, "")
        total = _sum(
            values, more, row_rstd1, gain, WEIGHT_OFFSET1,
            UNIT_DTYPE1, SCALED_DTYPE1, NORM_DTYPE1, h.dtype.element_ty,
        )  # fmt: skip
        write(h, row, columns, total, mask, N, 1)
        squares += total * total
    row_rstd2 = reciprocal_rms(tl.sum(squares, axis=1, keep_dims=True), eps2, N)
    tl.store(rstd2 + row + tl.arange(0, 1)[:, None], row_rstd2)

    # a thread reads what other threads wrote to h
    tl.debug_barrier()
    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        mask = mask_columns(columns, N, BLOCK)
        gain = read_weight(weight2, columns, mask, 1)
        total = load(point(h, row, columns, N, 1), mask, "").to(tl.float32)
        result = normalise(total, row_rstd2, gain, WEIGHT_OFFSET2, UNIT_DTYPE2)
        write(y, row, columns, round_to(result, SCALED_DTYPE2), mask, N, 1)


@triton.jit
def _norm_input_gradient(
    x_hat,
    gradient,
    rstd,
    weight,
    WEIGHT_OFFSET: tl.constexpr,
    N: tl.constexpr,
):
    """The gradient of the norm's input in fp32, from that of its output."""
    scaled = scale(gradient, weight, WEIGHT_OFFSET)
    c = tl.sum(x_hat * scaled, axis=1, keep_dims=True) / N
    return (scaled - x_hat * c) * rstd


@triton.jit(do_not_specialize=_BACKWARD_RUNTIME)
def backward(
    dy,
    dy2,
    dy3,
    x,
    h,
    dres,
    weight1,
    weight2,
    rstd1,
    rstd2,
    dx,
    dh,
    partials1,
    partials2,
    M,
    dy_stride,
    dy2_stride,
    dy3_stride,
    x_stride,
    h_stride,
    dres_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WEIGHT_OFFSET1: tl.constexpr,
    WEIGHT_OFFSET2: tl.constexpr,
):
    """dx, dh, and where `partials1` or 2 [programs, N] is given, a share of that dweight.

    dh goes into the first norm's backward before it is rounded.
    """
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)[None, :]
    column_mask = mask_columns(columns, N, BLOCK)
    gain1 = read_weight(weight1, columns, column_mask, ROWS)
    gain2 = read_weight(weight2, columns, column_mask, ROWS)
    if partials1 is not None:
        dweight1 = tl.zeros([ROWS, BLOCK], tl.float32)
    if partials2 is not None:
        dweight2 = tl.zeros([ROWS, BLOCK], tl.float32)

    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        first_row = tile * ROWS
        row_mask = mask_rows(first_row, M, ROWS)
        mask = mask_both(row_mask, column_mask)
        gradient = read_gradient(
            dy, dy2, dy3, dy_stride, dy2_stride, dy3_stride,
            first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first",
        )  # fmt: skip
        total = read(h, h_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first")
        values = read(x, x_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first")
        # before the reductions, which would otherwise delay this load
        if dres is not None:
            extra = read(
                dres, dres_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first"
            )
        row_rstd1 = load(rstd1 + first_row + tl.arange(0, ROWS)[:, None], row_mask, "")
        row_rstd2 = load(rstd2 + first_row + tl.arange(0, ROWS)[:, None], row_mask, "")

        h_hat = total.to(tl.float32) * row_rstd2
        if partials2 is not None:
            dweight2 += gradient * h_hat
        sum_gradient = _norm_input_gradient(h_hat, gradient, row_rstd2, gain2, WEIGHT_OFFSET2, N)
        if dres is not None:
            sum_gradient += extra.to(tl.float32)
        write(dh, first_row, columns, sum_gradient, mask, N, ROWS)

        x_hat = values.to(tl.float32) * row_rstd1
        if partials1 is not None:
            dweight1 += sum_gradient * x_hat
        result = _norm_input_gradient(x_hat, sum_gradient, row_rstd1, gain1, WEIGHT_OFFSET1, N)
        write(dx, first_row, columns, result, mask, N, ROWS)

    if partials1 is not None:
        share = tl.sum(dweight1, axis=0, keep_dims=True)
        share_row = point(partials1, program, columns, N, 1)
        tl.store(share_row, share, mask=column_mask, eviction_policy="evict_last")
    if partials2 is not None:
        share = tl.sum(dweight2, axis=0, keep_dims=True)
        share_row = point(partials2, program, columns, N, 1)
        tl.store(share_row, share, mask=column_mask, eviction_policy="evict_last")
