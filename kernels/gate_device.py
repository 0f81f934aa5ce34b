"""Triton kernels for x * silu(gate), alone and before or after an RMSNorm.

`silu_gate` and its backward work on tiles of ROWS rows by BLOCK of the N columns. The kernels with
a norm take rows of GROUP columns, N / GROUP of them beside each other in one row of the tensors:
a program works on tiles of ROWS rows of one group (BLOCK >= GROUP), the ``*_wide`` kernels on
chunks of a row. With GATE_FIRST they compute norm(x * silu(gate)), without it
norm(x) * silu(gate).

All is computed in fp32. A constant ``*_DTYPE`` is the dtype that a value is rounded to, or None.
FAST: with the GPU's approximate powers and reciprocals, which are exact enough for 16-bit results,
and flush a sigmoid of gates below -87 to 0.
"""

import triton
import triton.language as tl

from fxfuse.kernels.tile_device import (
    hide,
    load,
    mask_both,
    mask_columns,
    mask_rows,
    normalise,
    point,
    postpone,
    read,
    read_gradient,
    read_weight,
    reciprocal_rms,
    round_to,
    scale,
    write,
)

_FORWARD_RUNTIME = ["M", "x_stride", "gate_stride"]
_BACKWARD_RUNTIME = [*_FORWARD_RUNTIME, "dy_stride", "dy2_stride", "dy3_stride", "dres_stride"]


# ------------------------------------------------------------ steps


@triton.jit
def _multiply(
    values,
    gate,
    FAST: tl.constexpr,
    SIGMOID_DTYPE: tl.constexpr,
    SILU_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
):
    """values * silu(gate), both fp32."""
    if SIGMOID_DTYPE is None and not FAST:
        silu = gate / (1.0 + tl.exp(-gate))
    else:
        silu = gate * round_to(_sigmoid(gate, FAST), SIGMOID_DTYPE)
    return round_to(values * round_to(silu, SILU_DTYPE), PRODUCT_DTYPE)


@triton.jit
def _sigmoid(gate, FAST: tl.constexpr):
    if FAST:
        power = tl.exp2(gate * -1.4426950408889634)  # -log2(e)
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], tl.float32, is_pure=True, pack=1
        )
    else:
        result = 1.0 / (1.0 + tl.exp(-gate))
    return result


@triton.jit
def _slope(gate, share):
    """The derivative of silu(gate), with share = sigmoid(gate)."""
    return share * (1.0 + gate * (1.0 - share))


@triton.jit
def _norm_input(
    x,
    gate,
    GATE_FIRST: tl.constexpr,
    FAST: tl.constexpr,
    SIGMOID_DTYPE: tl.constexpr,
    SILU_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
    GATED_DTYPE: tl.constexpr,
):
    values = x.to(tl.float32)
    if GATE_FIRST:
        values = _multiply(
            values, gate.to(tl.float32), FAST, SIGMOID_DTYPE, SILU_DTYPE, PRODUCT_DTYPE
        )
        values = round_to(values, GATED_DTYPE)
    return values


@triton.jit
def _output(
    values,
    gate,
    row_rstd,
    weight,
    GATE_FIRST: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    FAST: tl.constexpr,
    SIGMOID_DTYPE: tl.constexpr,
    SILU_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
    UNIT_DTYPE: tl.constexpr,
    SCALED_DTYPE: tl.constexpr,
    NORM_DTYPE: tl.constexpr,
):
    normed = normalise(values, row_rstd, weight, WEIGHT_OFFSET, UNIT_DTYPE)
    result = round_to(normed, SCALED_DTYPE)
    if not GATE_FIRST:
        result = round_to(result, NORM_DTYPE)
        result = _multiply(
            result, gate.to(tl.float32), FAST, SIGMOID_DTYPE, SILU_DTYPE, PRODUCT_DTYPE
        )
    return result


@triton.jit
def _norm_terms(
    x,
    gate,
    share,
    gradient,
    row_rstd,
    GATE_FIRST: tl.constexpr,
    FAST: tl.constexpr,
    SIGMOID_DTYPE: tl.constexpr,
    SILU_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
    GATED_DTYPE: tl.constexpr,
):
    """The normalised row, of the product as the forward rounded it, and its norm's gradient."""
    if not GATE_FIRST:
        x_hat = x * row_rstd
        gradient = gradient * (gate * share)
    elif (
        SIGMOID_DTYPE is None
        and SILU_DTYPE is None
        and PRODUCT_DTYPE is None
        and GATED_DTYPE is None
    ):
        x_hat = x * (gate * share) * row_rstd
    else:
        product = _multiply(x, gate, FAST, SIGMOID_DTYPE, SILU_DTYPE, PRODUCT_DTYPE)
        x_hat = round_to(product, GATED_DTYPE) * row_rstd
    return x_hat, gradient


# ------------------------------------------------------------ without a norm


@triton.jit(do_not_specialize=_FORWARD_RUNTIME)
def silu_gate(
    x,
    gate,
    y,
    M,
    x_stride,
    gate_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    FAST: tl.constexpr,
    SIGMOID_DTYPE: tl.constexpr,
    SILU_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    first_row = program // BLOCKS * ROWS
    columns = program % BLOCKS * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = mask_both(mask_rows(first_row, M, ROWS), mask_columns(columns, N, BLOCK))
    values = read(x, x_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first")
    factors = read(gate, gate_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first")
    result = _multiply(
        values.to(tl.float32),
        factors.to(tl.float32),
        FAST,
        SIGMOID_DTYPE,
        SILU_DTYPE,
        PRODUCT_DTYPE,
    )
    write(y, first_row, columns, result, mask, N, ROWS)


@triton.jit(do_not_specialize=_BACKWARD_RUNTIME)
def silu_gate_backward(
    dy,
    dy2,
    dy3,
    x,
    gate,
    dx,
    dgate,
    M,
    dy_stride,
    dy2_stride,
    dy3_stride,
    x_stride,
    gate_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    FAST: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    first_row = program // BLOCKS * ROWS
    columns = program % BLOCKS * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = mask_both(mask_rows(first_row, M, ROWS), mask_columns(columns, N, BLOCK))
    gradient = read_gradient(
        dy, dy2, dy3, dy_stride, dy2_stride, dy3_stride,
        first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first",
    )  # fmt: skip
    values = read(x, x_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first")
    factors = read(gate, gate_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first")
    factors = factors.to(tl.float32)
    share = _sigmoid(factors, FAST)
    write(dx, first_row, columns, gradient * (factors * share), mask, N, ROWS)
    gate_result = gradient * values.to(tl.float32) * _slope(factors, share)
    write(dgate, first_row, columns, gate_result, mask, N, ROWS)


# ------------------------------------------------------------ with a norm


@triton.jit(do_not_specialize=_FORWARD_RUNTIME)
def forward(
    x,
    gate,
    weight,
    y,
    rstd,
    M,
    x_stride,
    gate_stride,
    eps,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    FAST: tl.constexpr,
    SIGMOID_DTYPE: tl.constexpr,
    SILU_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
    GATED_DTYPE: tl.constexpr,
    UNIT_DTYPE: tl.constexpr,
    SCALED_DTYPE: tl.constexpr,
    NORM_DTYPE: tl.constexpr,
):
    GROUPS: tl.constexpr = N // GROUP
    group = tl.program_id(0) % GROUPS
    first_row = tl.program_id(0) // GROUPS * ROWS
    columns = tl.arange(0, BLOCK)[None, :]
    row_mask = mask_rows(first_row, M, ROWS)
    column_mask = mask_columns(columns, GROUP, BLOCK)
    mask = mask_both(row_mask, column_mask)
    columns += group * GROUP

    # all loads stand before the reduction, so that none of them waits for it
    values = read(x, x_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first")
    factors = read(gate, gate_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first")
    gain = read_weight(weight, columns, column_mask, ROWS)

    values = _norm_input(
        values, factors, GATE_FIRST, FAST, SIGMOID_DTYPE, SILU_DTYPE, PRODUCT_DTYPE, GATED_DTYPE
    )
    row_rstd = reciprocal_rms(tl.sum(values * values, axis=1, keep_dims=True), eps, GROUP)
    tl.store(point(rstd, first_row, group, GROUPS, ROWS), row_rstd, mask=row_mask)
    result = _output(
        values, factors, row_rstd, gain, GATE_FIRST, WEIGHT_OFFSET,
        FAST, SIGMOID_DTYPE, SILU_DTYPE, PRODUCT_DTYPE, UNIT_DTYPE, SCALED_DTYPE, NORM_DTYPE,
    )  # fmt: skip
    write(y, first_row, columns, result, mask, N, ROWS)


@triton.jit(do_not_specialize=_FORWARD_RUNTIME)
def forward_wide(
    x,
    gate,
    weight,
    y,
    rstd,
    M,
    x_stride,
    gate_stride,
    eps,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    FAST: tl.constexpr,
    SIGMOID_DTYPE: tl.constexpr,
    SILU_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
    GATED_DTYPE: tl.constexpr,
    UNIT_DTYPE: tl.constexpr,
    SCALED_DTYPE: tl.constexpr,
    NORM_DTYPE: tl.constexpr,
):
    """One row a program, read twice in chunks: the second time from the cache."""
    GROUPS: tl.constexpr = N // GROUP
    group = tl.program_id(0) % GROUPS
    row = tl.program_id(0) // GROUPS
    end = hide(M, GROUP)
    squares = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        mask = mask_columns(columns, GROUP, BLOCK)
        columns += group * GROUP
        values = read(x, x_stride, row, columns, mask, 1, STRIDE_UNIT, "")
        factors = values
        if GATE_FIRST:
            factors = read(gate, gate_stride, row, columns, mask, 1, STRIDE_UNIT, "")
        values = _norm_input(
            values, factors, GATE_FIRST, FAST, SIGMOID_DTYPE, SILU_DTYPE, PRODUCT_DTYPE, GATED_DTYPE
        )
        squares += values * values
    row_rstd = reciprocal_rms(tl.sum(squares, axis=1, keep_dims=True), eps, GROUP)
    tl.store(point(rstd, row, group, GROUPS, 1), row_rstd)

    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        mask = mask_columns(columns, GROUP, BLOCK)
        columns += group * GROUP
        gain = read_weight(weight, columns, mask, 1)
        values = read(x, x_stride, row, columns, mask, 1, STRIDE_UNIT, "")
        factors = read(gate, gate_stride, row, columns, mask, 1, STRIDE_UNIT, "")
        values = _norm_input(
            values, factors, GATE_FIRST, FAST, SIGMOID_DTYPE, SILU_DTYPE, PRODUCT_DTYPE, GATED_DTYPE
        )
        result = _output(
            values, factors, row_rstd, gain, GATE_FIRST, WEIGHT_OFFSET,
            FAST, SIGMOID_DTYPE, SILU_DTYPE, PRODUCT_DTYPE, UNIT_DTYPE, SCALED_DTYPE, NORM_DTYPE,
        )  # fmt: skip
        write(y, row, columns, result, mask, N, 1)


@triton.jit(do_not_specialize=_BACKWARD_RUNTIME)
def backward(
    dy,
    dy2,
    dy3,
    x,
    gate,
    dres,
    weight,
    rstd,
    dx,
    dgate,
    partials,
    M,
    dy_stride,
    dy2_stride,
    dy3_stride,
    x_stride,
    gate_stride,
    dres_stride,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    FAST: tl.constexpr,
    SIGMOID_DTYPE: tl.constexpr,
    SILU_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
    GATED_DTYPE: tl.constexpr,
):
    """dx, dgate, and where `partials` [programs / groups, N] is given, a share of dweight.

    A program stays with one group, and so with one accumulator for its columns of dweight.
    """
    GROUPS: tl.constexpr = N // GROUP
    group = tl.program_id(0) % GROUPS
    program = tl.program_id(0) // GROUPS
    programs = tl.num_programs(0) // GROUPS
    columns = tl.arange(0, BLOCK)[None, :]
    column_mask = mask_columns(columns, GROUP, BLOCK)
    columns += group * GROUP
    gain = read_weight(weight, columns, column_mask, ROWS)
    if partials is not None:
        dweight = tl.zeros([ROWS, BLOCK], tl.float32)

    for tile in tl.range(program, tl.cdiv(M, ROWS), programs, num_stages=STAGES):
        first_row = tile * ROWS
        row_mask = mask_rows(first_row, M, ROWS)
        mask = mask_both(row_mask, column_mask)
        gradient = read_gradient(
            dy, dy2, dy3, dy_stride, dy2_stride, dy3_stride,
            first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first",
        )  # fmt: skip
        values = read(x, x_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first")
        factors = read(
            gate, gate_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first"
        )
        # before the reduction, which would otherwise delay this load
        if dres is not None:
            extra = read(
                dres, dres_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, "evict_first"
            )
        row_rstd = load(point(rstd, first_row, group, GROUPS, ROWS), row_mask, "")

        share = _sigmoid(factors.to(tl.float32), FAST)
        x_hat, dnormed = _norm_terms(
            values.to(tl.float32), factors.to(tl.float32), share, gradient, row_rstd,
            GATE_FIRST, FAST, SIGMOID_DTYPE, SILU_DTYPE, PRODUCT_DTYPE, GATED_DTYPE,
        )  # fmt: skip
        if not GATE_FIRST:
            # here rather than below, so that no register holds it during the reduction
            gate_result = gradient * scale(x_hat, gain, WEIGHT_OFFSET)
            gate_result *= _slope(factors.to(tl.float32), share)
            write(dgate, first_row, columns, gate_result, mask, N, ROWS)
        if partials is not None:
            dweight += dnormed * x_hat
        scaled = scale(dnormed, gain, WEIGHT_OFFSET)
        c = tl.sum(x_hat * scaled, axis=1, keep_dims=True) / GROUP
        if GATE_FIRST:
            # anew, as registers cannot hold all of it during the reduction
            values = postpone(values, c, M).to(tl.float32)
            factors = postpone(factors, c, M).to(tl.float32)
            share = postpone(share, c, M)
            x_hat, _ = _norm_terms(
                values, factors, share, gradient, row_rstd,
                GATE_FIRST, FAST, SIGMOID_DTYPE, SILU_DTYPE, PRODUCT_DTYPE, GATED_DTYPE,
            )  # fmt: skip
        result = (scaled - x_hat * c) * row_rstd
        if GATE_FIRST:
            gate_result = result * values * _slope(factors, share)
            write(dgate, first_row, columns, gate_result, mask, N, ROWS)
            result = result * (factors * share)
        if dres is not None:
            result += extra.to(tl.float32)
        write(dx, first_row, columns, result, mask, N, ROWS)

    if partials is not None:
        share = tl.sum(dweight, axis=0, keep_dims=True)
        share_row = point(partials, program, columns, N, 1)
        tl.store(share_row, share, mask=column_mask, eviction_policy="evict_last")


@triton.jit(do_not_specialize=_BACKWARD_RUNTIME)
def backward_wide(
    dy,
    dy2,
    dy3,
    x,
    gate,
    dres,
    weight,
    rstd,
    dx,
    dgate,
    partials,
    M,
    dy_stride,
    dy2_stride,
    dy3_stride,
    x_stride,
    gate_stride,
    dres_stride,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    FAST: tl.constexpr,
    SIGMOID_DTYPE: tl.constexpr,
    SILU_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
    GATED_DTYPE: tl.constexpr,
):
    """One row at a time, in chunks; dweight gathers in `partials`, as registers cannot hold it."""
    GROUPS: tl.constexpr = N // GROUP
    group = tl.program_id(0) % GROUPS
    program = tl.program_id(0) // GROUPS
    end = hide(M, GROUP)
    for row in range(program, M, tl.num_programs(0) // GROUPS):
        row_rstd = load(point(rstd, row, group, GROUPS, 1), None, "")
        products = tl.zeros([1, BLOCK], tl.float32)
        for start in tl.range(0, end, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)[None, :]
            mask = mask_columns(columns, GROUP, BLOCK)
            columns += group * GROUP
            gain = read_weight(weight, columns, mask, 1)
            gradient = read_gradient(
                dy, dy2, dy3, dy_stride, dy2_stride, dy3_stride,
                row, columns, mask, 1, STRIDE_UNIT, "",
            )  # fmt: skip
            values = read(x, x_stride, row, columns, mask, 1, STRIDE_UNIT, "").to(tl.float32)
            factors = read(gate, gate_stride, row, columns, mask, 1, STRIDE_UNIT, "")
            factors = factors.to(tl.float32)
            x_hat, dnormed = _norm_terms(
                values, factors, _sigmoid(factors, FAST), gradient, row_rstd,
                GATE_FIRST, FAST, SIGMOID_DTYPE, SILU_DTYPE, PRODUCT_DTYPE, GATED_DTYPE,
            )  # fmt: skip
            products += x_hat * scale(dnormed, gain, WEIGHT_OFFSET)
        c = tl.sum(products, axis=1, keep_dims=True) / GROUP

        # the row before has stored its partials; only then may this one read them
        tl.debug_barrier()
        for start in tl.range(0, end, BLOCK, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK)[None, :]
            mask = mask_columns(columns, GROUP, BLOCK)
            columns += group * GROUP
            gain = read_weight(weight, columns, mask, 1)
            gradient = read_gradient(
                dy, dy2, dy3, dy_stride, dy2_stride, dy3_stride,
                row, columns, mask, 1, STRIDE_UNIT, "evict_first",
            )  # fmt: skip
            values = read(x, x_stride, row, columns, mask, 1, STRIDE_UNIT, "evict_first")
            factors = read(gate, gate_stride, row, columns, mask, 1, STRIDE_UNIT, "evict_first")
            values = values.to(tl.float32)
            factors = factors.to(tl.float32)
            share = _sigmoid(factors, FAST)
            x_hat, dnormed = _norm_terms(
                values, factors, share, gradient, row_rstd,
                GATE_FIRST, FAST, SIGMOID_DTYPE, SILU_DTYPE, PRODUCT_DTYPE, GATED_DTYPE,
            )  # fmt: skip
            result = (scale(dnormed, gain, WEIGHT_OFFSET) - x_hat * c) * row_rstd
            if GATE_FIRST:
                gate_result = result * values * _slope(factors, share)
                result = result * (factors * share)
            else:
                gate_result = gradient * scale(x_hat, gain, WEIGHT_OFFSET) * _slope(factors, share)
            write(dgate, row, columns, gate_result, mask, N, 1)
            if dres is not None:
                extra = read(dres, dres_stride, row, columns, mask, 1, STRIDE_UNIT, "evict_first")
                result += extra.to(tl.float32)
            write(dx, row, columns, result, mask, N, 1)
            if partials is not None:
                share_row = point(partials, program, columns, N, 1)
                share = dnormed * x_hat
                if row != program:
                    share += load(share_row, mask, "")
                tl.store(share_row, share, mask=mask, eviction_policy="evict_last")
