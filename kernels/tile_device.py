"""What the Triton kernels share: reading and writing tiles of rows, and the steps of a norm.

Row strides arrive divided by STRIDE_UNIT: the factor inside the kernel lets the compiler prove
that rows begin at 16-byte boundaries. Row bases are 64-bit scalars, offsets in a tile 32-bit.
"""

import triton
import triton.language as tl


@triton.jit
def load(pointers, mask, EVICTION: tl.constexpr):
    if mask is None:
        values = tl.load(pointers, eviction_policy=EVICTION)
    else:
        values = tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICTION)
    return values


@triton.jit
def mask_rows(first_row, M, ROWS: tl.constexpr):
    if ROWS == 1:  # noqa: SIM108 (Triton 3.6 cannot return a conditional None)
        mask = None
    else:
        mask = first_row + tl.arange(0, ROWS)[:, None] < M
    return mask


@triton.jit
def mask_columns(columns, N: tl.constexpr, BLOCK: tl.constexpr):
    if N % BLOCK == 0:  # noqa: SIM108
        mask = None
    else:
        mask = columns < N
    return mask


@triton.jit
def mask_both(row_mask, column_mask):
    if row_mask is None:
        mask = column_mask
    elif column_mask is None:
        mask = row_mask
    else:
        mask = row_mask & column_mask
    return mask


@triton.jit
def read(
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
    return load(pointers, mask, EVICTION)


@triton.jit
def point(base, first_row, columns, N: tl.constexpr, ROWS: tl.constexpr):
    """Pointers to ROWS rows of a contiguous tensor."""
    return base + tl.cast(first_row, tl.int64) * N + (tl.arange(0, ROWS)[:, None] * N + columns)


@triton.jit
def read_weight(weight, columns, mask, ROWS: tl.constexpr):
    if weight is None:
        values = None
    else:
        # indexed like the tile, so that the values are loaded in the tile's layout
        pointers = weight + (tl.arange(0, ROWS)[:, None] * 0 + columns)
        values = load(pointers, mask, "evict_last")
    return values


@triton.jit
def write(base, first_row, columns, values, mask, N: tl.constexpr, ROWS: tl.constexpr):
    """Store ROWS rows of a contiguous tensor, in its dtype."""
    pointers = point(base, first_row, columns, N, ROWS)
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def round_to(values, DTYPE: tl.constexpr):
    """fp32 values that `DTYPE` has; None leaves them."""
    if DTYPE is not None:
        values = values.to(DTYPE).to(tl.float32)
    return values


@triton.jit
def add_rounded(a, b, DTYPE: tl.constexpr):
    return (a.to(tl.float32) + b.to(tl.float32)).to(DTYPE)


@triton.jit
def reciprocal_rms(square_sum, eps, N: tl.constexpr):
    # eps may arrive as fp64, which would promote all that follows
    return tl.rsqrt(square_sum / N + tl.cast(eps, tl.float32))


@triton.jit
def scale(values, weight, WEIGHT_OFFSET: tl.constexpr):
    """values * (weight_offset + weight) in fp32."""
    if weight is not None:
        factor = weight.to(tl.float32)
        if WEIGHT_OFFSET != 0.0:
            factor = factor + WEIGHT_OFFSET
        values = values * factor
    return values


@triton.jit
def normalise(h, rstd, weight, WEIGHT_OFFSET: tl.constexpr, UNIT_DTYPE: tl.constexpr):
    return scale(round_to(h * rstd, UNIT_DTYPE), weight, WEIGHT_OFFSET)


@triton.jit
def read_gradient(
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
    total = read(dy, dy_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, EVICTION)
    if dy2 is not None:
        more = read(dy2, dy2_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, EVICTION)
        total = add_rounded(total, more, DTYPE)
    if dy3 is not None:
        more = read(dy3, dy3_stride, first_row, columns, mask, ROWS, STRIDE_UNIT, EVICTION)
        total = add_rounded(total, more, DTYPE)
    return total.to(tl.float32)


@triton.jit
def hide(M, N: tl.constexpr):
    # N, but the compiler does not know: it would unroll the chunks and run out of registers
    return tl.where(M > 0, N, 0)


@triton.jit
def postpone(values, result, M):
    """`values`, but the compiler does not know: it computes what follows only after `result`."""
    return tl.where((result == result) | (M > 0), values, 0.0)
