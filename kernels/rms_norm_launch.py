"""Launches the RMSNorm kernels: what they take, how they are cut into programs, and the calls."""

import functools
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from fxfuse.kernels import rms_norm_device, rows
from fxfuse.kernels.rows import (
    DTYPES,
    MAX_GRADIENTS,
    SHARED_MEMORY,
    Plan,
    Rows,
    common_unit,
    contiguous,
    count_programs,
    launch,
    properties,
    widest,
)

__all__ = ["DTYPES", "MAX_GRADIENTS", "backward", "finalize", "forward", "plan", "unfit"]

# The widest block of columns that one tile holds, by the bytes of an element; wider rows are
# walked in chunks of the second number.
_WIDEST = {
    "forward": ({2: 32768, 4: 16384}, 8192),
    "backward": ({2: 8192, 4: 8192}, 4096),
}


@functools.cache
def plan(
    kernel: str,
    N: int,
    dtype: torch.dtype,
    *,
    row_tensors: int = 2,
    shared_memory: int = SHARED_MEMORY,
) -> Plan:
    """How a kernel ("forward", "backward" or "finalize") is cut for rows of N columns.

    dtype: the widest dtype among the tensors of M rows; fp32 for "finalize".
    row_tensors: how many tensors of M rows the kernel reads.
    shared_memory: bytes that one program may use.
    """
    if kernel == "finalize":
        return _plan_finalize(N)
    limits, chunk = _WIDEST[kernel]
    block, tile_rows = rows.tile_of(N, dtype.itemsize, limits[dtype.itemsize], chunk)
    wide = block < N
    constants = {"N": N, "BLOCK": block, "ROWS": tile_rows}
    if kernel == "backward":
        # the chunked kernel also buffers the weight
        buffers = 3 * (row_tensors + 1) if wide else 2 * row_tensors
        tile_bytes = tile_rows * block * dtype.itemsize
        constants["STAGES"] = rows.count_stages(tile_bytes, buffers, shared_memory)
    return Plan(
        kernel=getattr(rms_norm_device, f"{kernel}_wide" if wide else kernel),
        constants=constants,
        num_warps=rows.count_warps(tile_rows * block),
        resident=rows.count_resident(block),
    )


def _plan_finalize(N: int) -> Plan:
    block = 32 if N <= 256 else 64
    constants = {"N": N, "BLOCK": block, "ROWS": 4096 // block}
    return Plan(rms_norm_device.finalize, constants, num_warps=8)


def unfit(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    compute_dtype: torch.dtype,
    unit_dtype: torch.dtype | None,
) -> str | None:
    """Why the kernels cannot take these tensors, in one sentence; None where they can.

    x: [..., N]; residual: x's shape; weight: [N]; all fp32, fp16 or bf16, on one GPU.
    """
    return rows.unfit(
        {"input": x, "residual": residual},
        {"weight": weight},
        compute_dtype=compute_dtype,
        dtypes=[unit_dtype],
    )


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float,
    weight_offset: float,
    unit_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y = h / rms(h) * (weight_offset + weight), with h = x + residual rounded to its dtype.

    x: [..., N]; residual: the same shape or None; weight: [N] or None. `unit_dtype` is the dtype
    that h / rms(h) is rounded to before the multiplication, None for no rounding.
    Returns y [..., N] in `out_dtype`; h [..., N] in the promoted dtype of x and residual, None
    without a residual; rstd [...] in fp32. All of them contiguous and new.
    """
    N = x.shape[-1]
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    h = None
    if residual is not None:
        h_dtype = torch.promote_types(x.dtype, residual.dtype)
        h = torch.empty(x.shape, dtype=h_dtype, device=x.device)
    if x.numel() == 0:
        return y, h, rstd

    operands = [Rows.of(x), Rows.of(residual)]
    cut = plan("forward", N, widest(x, residual, y))
    M = x.numel() // N
    unit = common_unit(operands)
    launch(
        cut,
        triton.cdiv(M, cut.constants["ROWS"]),
        *(r.tensor for r in operands),
        contiguous(weight),
        y,
        h,
        rstd,
        M,
        *(r.stride // unit for r in operands),
        float(eps),
        STRIDE_UNIT=unit,
        WEIGHT_OFFSET=float(weight_offset),
        UNIT_DTYPE=None if unit_dtype is None else DTYPES[unit_dtype],
    )
    return y, h, rstd


def backward(
    dys: Sequence[Tensor],
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None,
    *,
    weight_offset: float,
    need_dweight: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `forward` with respect to h and the weight.

    dys: one to three [..., N], added with a rounding to their dtype after each addition;
    h: [..., N], the norm's input; weight: [N] or None; rstd: [...] in fp32; dres: [..., N] or
    None, the gradient that reaches h past the norm, added before dh is rounded.
    Returns dh [..., N], contiguous, in h's dtype; dweight [N] in the weight's dtype, or None.
    """
    N = h.shape[-1]
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    need_dweight = need_dweight and weight is not None
    if h.numel() == 0:
        return dh, torch.zeros_like(weight) if need_dweight else None

    dys = rows.same_dtype(dys)
    operands = [*rows.gradient_rows(dys), Rows.of(h), Rows.of(dres)]
    device = properties(h.device)
    cut = plan(
        "backward",
        N,
        widest(*dys, h, dres),
        row_tensors=sum(r.tensor is not None for r in operands),
        shared_memory=device.shared_memory,
    )
    M = h.numel() // N
    programs = count_programs(M, cut, device.multiprocessors)
    partials = None
    if need_dweight:
        partials = torch.empty(programs, N, dtype=torch.float32, device=h.device)
    unit = common_unit(operands)
    launch(
        cut,
        programs,
        *(r.tensor for r in operands[:4]),
        contiguous(weight),
        rstd.contiguous(),
        operands[4].tensor,
        dh,
        partials,
        M,
        *(r.stride // unit for r in operands),
        STRIDE_UNIT=unit,
        WEIGHT_OFFSET=float(weight_offset),
    )
    if partials is None:
        return dh, None
    return dh, finalize(partials, weight)


def finalize(partials: Tensor, weight: Tensor) -> Tensor:
    """dweight [N], in the weight's dtype, from partial sums [programs, N] in fp32."""
    programs, N = partials.shape
    dweight = torch.empty(N, dtype=weight.dtype, device=weight.device)
    cut = plan("finalize", N, partials.dtype)
    launch(cut, triton.cdiv(N, cut.constants["BLOCK"]), partials, dweight, programs)
    return dweight
