"""Launches the RMSNorm kernels: what they take, how they are cut into programs, and the calls."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor

from fxfuse.kernels import choice, rms_norm_device, rows
from fxfuse.kernels.choice import DEFAULT, Architecture, Plan, device_of, ladder
from fxfuse.kernels.rows import (
    DTYPES,
    MAX_GRADIENTS,
    Rows,
    common_unit,
    contiguous,
    count_programs,
    launch,
    widest,
)
from fxfuse.kernels.settle import settle

__all__ = ["DTYPES", "MAX_GRADIENTS", "backward", "finalize", "forward", "plan", "unfit"]

# The widest block of columns that one tile holds, by the bytes of an element; the forward walks
# wider rows in chunks.
_WIDEST = {"forward": {2: 32768, 4: 16384}, "backward": {2: 8192, 4: 8192}}
_FORWARD_CHUNK = 8192
# The backward's chunks, of rows of at most so many columns: bytes of a chunk, warps, and most
# registers of a thread. A program holds its share of dweight in registers. With 128 of them two
# programs of 8 warps fit on a multiprocessor, and one loads while the other computes.
_CHUNKS = ((16384, 4096, 8, 128), (32768, 8192, 16, None))
# Of wider rows, whose share of dweight no registers hold.
_WIDE_CHUNK = 4096
# Columns for which a program of a cluster is there.
_CLUSTERED = {"forward": 32768, "backward": 8192}
_MOST_CLUSTERED = 8


@functools.cache
def plan(
    kernel: str,
    N: int,
    dtype: torch.dtype,
    *,
    row_tensors: int = 2,
    architecture: Architecture = DEFAULT,
) -> Plan:
    """How a kernel ("forward", "backward" or "finalize") is cut for rows of N columns.

    dtype: the widest dtype among the tensors of M rows; fp32 for "finalize".
    row_tensors: how many tensors of M rows the kernel reads.
    """
    if kernel == "finalize":
        return _finalize(N)
    cut = _forward if kernel == "forward" else _backward
    return ladder([*_clustered(kernel, N, architecture), *cut(N, dtype, row_tensors, architecture)])


def _finalize(N: int) -> Plan:
    block = 32 if N <= 256 else 64
    constants = {"N": N, "BLOCK": block, "ROWS": 4096 // block}
    return Plan(rms_norm_device.finalize, constants, num_warps=8)


def _forward(N: int, dtype: torch.dtype, _: int, architecture: Architecture) -> Iterator[Plan]:
    limit = _WIDEST["forward"][dtype.itemsize]
    block, tile_rows = choice.tile_of(N, dtype.itemsize, limit, _FORWARD_CHUNK)
    yield Plan(
        rms_norm_device.forward_wide if block < N else rms_norm_device.forward,
        {"N": N, "BLOCK": block, "ROWS": tile_rows},
        choice.count_warps(tile_rows * block) * 32 // architecture.lanes,
    )


def _backward(
    N: int, dtype: torch.dtype, row_tensors: int, architecture: Architecture
) -> Iterator[Plan]:
    """Whole rows; chunks where they are wider, spill registers or leave no room to load ahead."""
    limit = _WIDEST["backward"][dtype.itemsize]
    block, tile_rows = choice.tile_of(N, dtype.itemsize, limit, _WIDE_CHUNK)
    whole = choice.looped(
        rms_norm_device.backward,
        {"N": N, "BLOCK": block, "ROWS": tile_rows},
        choice.count_warps(tile_rows * block),
        row_tensors * tile_rows * block * dtype.itemsize,
        architecture,
    )
    chunked = list(_chunked(N, dtype, row_tensors, architecture))
    if block >= N and (whole.constants["STAGES"] > 1 or not chunked):
        yield whole
        if tile_rows > 1:
            yield from choice.spread(whole, dtype.itemsize, architecture)
    yield from chunked
    if block < N:
        wide = _wide(N, block, dtype, row_tensors, architecture)
        if wide.constants["STAGES"] == 1:  # no room to load ahead
            wide = _wide(N, block // 2, dtype, row_tensors, architecture)
        yield replace(wide, worse=True)  # it adds up dweight in memory


def _wide(
    N: int, chunk: int, dtype: torch.dtype, row_tensors: int, architecture: Architecture
) -> Plan:
    return choice.looped(
        rms_norm_device.backward_wide,
        {"N": N, "BLOCK": chunk, "ROWS": 1},
        choice.count_warps(chunk),
        (row_tensors + 1) * chunk * dtype.itemsize,  # the weight too
        architecture,
    )


def _chunked(
    N: int, dtype: torch.dtype, row_tensors: int, architecture: Architecture
) -> Iterator[Plan]:
    for columns, chunk_bytes, warps, registers in _CHUNKS:
        chunk = chunk_bytes // dtype.itemsize
        if chunk < N <= columns:
            yield choice.looped(
                rms_norm_device.backward_chunks,
                {"N": N, "BLOCK": chunk, "ROWS": 1},
                warps,
                (row_tensors + 1) * chunk_bytes,  # the weight too
                architecture,
                registers,
            )


def _clustered(kernel: str, N: int, architecture: Architecture) -> Iterator[Plan]:
    """Whole rows that several programs share."""
    block = triton.next_power_of_2(N)
    clusters = block // _CLUSTERED[kernel]
    if architecture.clusters and 1 < clusters <= _MOST_CLUSTERED:
        constants = {"N": N, "BLOCK": block, "ROWS": 1}
        if kernel == "backward":
            constants["STAGES"] = architecture.stages
        yield Plan(
            getattr(rms_norm_device, kernel), constants, num_warps=16,
            resident=int(kernel == "backward"), clusters=clusters,
        )  # fmt: skip


def unfit(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    compute_dtype: torch.dtype,
    dtypes: Sequence[torch.dtype | None] = (),
) -> str | None:
    """Why the kernels cannot take these tensors, in one sentence; None where they can.

    x: [..., N]; residual: x's shape; weight: [N]; all fp32, fp16 or bf16, on one GPU.
    """
    return rows.unfit(
        {"input": x, "residual": residual},
        {"weight": weight},
        compute_dtype=compute_dtype,
        dtypes=dtypes,
    )


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float,
    weight_offset: float,
    rstd_dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype | None = None,
    unit_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y = h / rms(h) * (weight_offset + weight), with h = x + residual rounded to its dtype.

    x: [..., N]; residual: the same shape or None; weight: [N] or None. `rstd_dtype`,
    `scale_dtype` and `unit_dtype` are what 1 / rms(h), that times the weight, and h / rms(h) are
    rounded to, None for no rounding.
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
    device = device_of(x)
    cut = plan("forward", N, widest(x, residual, y), architecture=device.architecture)
    M = x.numel() // N
    unit = common_unit(operands)
    arguments = (
        *(r.tensor for r in operands),
        contiguous(weight),
        y,
        h,
        rstd,
        M,
        *(r.stride // unit for r in operands),
        float(eps),
    )
    constants = {
        "STRIDE_UNIT": unit,
        "WEIGHT_OFFSET": float(weight_offset),
        "RSTD_DTYPE": rows.rounding(rstd_dtype),
        "SCALE_DTYPE": rows.rounding(None if weight is None else scale_dtype),
        "UNIT_DTYPE": rows.rounding(unit_dtype),
    }
    cut = settle(cut, arguments, constants, device)
    launch(cut, triton.cdiv(M, cut.constants["ROWS"]), arguments, constants)
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
    device = device_of(h)
    cut = plan(
        "backward",
        N,
        widest(*dys, h, dres),
        row_tensors=sum(r.tensor is not None for r in operands),
        architecture=device.architecture,
    )
    M = h.numel() // N
    unit = common_unit(operands)
    weight_row, rstds = contiguous(weight), rstd.contiguous()
    constants = {"STRIDE_UNIT": unit, "WEIGHT_OFFSET": float(weight_offset)}

    def arguments(partials: Tensor | torch.dtype | None) -> tuple:
        return (
            *(r.tensor for r in operands[:4]),
            weight_row,
            rstds,
            operands[4].tensor,
            dh,
            partials,
            M,
            *(r.stride // unit for r in operands),
        )

    cut = settle(cut, arguments(torch.float32 if need_dweight else None), constants, device)
    programs = count_programs(M, cut, device.multiprocessors)
    partials = None
    if need_dweight:
        partials = torch.empty(programs, N, dtype=torch.float32, device=h.device)
    launch(cut, programs, arguments(partials), constants)
    return dh, None if partials is None else finalize(partials, weight)


def finalize(partials: Tensor, weight: Tensor) -> Tensor:
    """dweight [N], in the weight's dtype, from partial sums [programs, N] in fp32."""
    programs, N = partials.shape
    dweight = torch.empty(N, dtype=weight.dtype, device=weight.device)
    cut = plan("finalize", N, partials.dtype)
    launch(cut, triton.cdiv(N, cut.constants["BLOCK"]), (partials, dweight, programs), {})
    return dweight
