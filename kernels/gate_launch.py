"""Launches the gate kernels: what they take, how they are cut into programs, and the calls.

Throughout, dtypes that a value is rounded to may be None for no rounding, except `out_dtype`, the
dtype of y. Results are contiguous and new.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from fxfuse.kernels import choice, gate_device, rows
from fxfuse.kernels.choice import DEFAULT, Architecture, Plan, device_of, ladder
from fxfuse.kernels.rms_norm_launch import finalize
from fxfuse.kernels.rows import (
    DTYPES,
    MAX_GRADIENTS,
    Rows,
    common_unit,
    contiguous,
    count_programs,
    launch,
    rounding,
    scaled_dtype,
    widest,
)
from fxfuse.kernels.settle import settle

__all__ = [
    "DTYPES",
    "MAX_GRADIENTS",
    "plan",
    "rms_norm_silu_gate",
    "rms_norm_silu_gate_backward",
    "silu_gate",
    "silu_gate_backward",
    "silu_gate_rms_norm",
    "silu_gate_rms_norm_backward",
    "unfit",
]


@dataclass(frozen=True)
class _Cut:
    """How the rows of a kernel with a norm are cut.

    widest: columns of the widest block that one tile holds, by the bytes of an element; wider rows
    are walked in chunks.
    """

    kernel: str
    gate_first: bool
    widest: Mapping[int, int]
    chunk: int


# Chosen so that no registers are spilled.
_CUTS = {
    "rms_norm_silu_gate": _Cut("forward", False, {2: 16384, 4: 16384}, 4096),
    "silu_gate_rms_norm": _Cut("forward", True, {2: 16384, 4: 16384}, 4096),
    "rms_norm_silu_gate_backward": _Cut("backward", False, {2: 8192, 4: 8192}, 4096),
    "silu_gate_rms_norm_backward": _Cut("backward", True, {2: 8192, 4: 4096}, 4096),
}
# Columns of a chunk, so that a thread still reads 16 bytes.
_LEAST_CHUNK = 1024
# Columns of a tile without a norm: no fewer, so that a memory access is long enough.
_LEAST_BLOCK = 32


@functools.cache
def plan(
    kernel: str,
    N: int,
    dtype: torch.dtype,
    *,
    group: int = 0,
    row_tensors: int = 3,
    architecture: Architecture = DEFAULT,
) -> Plan:
    """How the kernel of an op, or of its backward, is cut for rows of N columns.

    kernel: the name of the function that launches it.
    dtype: the widest dtype among the tensors of M rows.
    group: how many columns the norm is taken of, 0 for all.
    row_tensors: how many tensors of M rows the kernel reads.
    """
    if kernel not in _CUTS:
        return _plan_elementwise(kernel, N, dtype, architecture)
    cut = _CUTS[kernel]
    first = _plan_norm(cut, N, group or N, dtype, row_tensors, architecture)
    chunk = cut.chunk
    while first.constants.get("STAGES") == 1 and chunk >= _LEAST_CHUNK:
        # tiles this wide leave no room to load ahead
        smaller = replace(cut, widest=dict.fromkeys(cut.widest, chunk), chunk=chunk)
        first = _plan_norm(smaller, N, group or N, dtype, row_tensors, architecture)
        chunk //= 2
    if cut.kernel == "forward":
        return first
    return ladder([first, *choice.spread(first, dtype.itemsize, architecture)])


def _plan_norm(
    cut: _Cut,
    N: int,
    group: int,
    dtype: torch.dtype,
    row_tensors: int,
    architecture: Architecture,
) -> Plan:
    limit = cut.widest[dtype.itemsize]
    block, tile_rows = choice.tile_of(group, dtype.itemsize, limit, cut.chunk)
    wide = block < group
    kernel = getattr(gate_device, f"{cut.kernel}_wide" if wide else cut.kernel)
    constants = {"N": N, "GROUP": group, "BLOCK": block, "ROWS": tile_rows}
    constants["GATE_FIRST"] = cut.gate_first
    constants["FAST"] = _fast(kernel, dtype, architecture)
    warps = choice.count_warps(tile_rows * block)
    if cut.kernel == "forward":
        return Plan(kernel, constants, warps * 32 // architecture.lanes)
    # the chunked kernel loads the weight too
    turn_bytes = (row_tensors + wide) * tile_rows * block * dtype.itemsize
    return choice.looped(kernel, constants, warps, turn_bytes, architecture)


def _plan_elementwise(kernel: str, N: int, dtype: torch.dtype, architecture: Architecture) -> Plan:
    elements = choice.NARROW_TILE_BYTES // dtype.itemsize
    block = min(elements, triton.next_power_of_2(N))
    # at most a sixteenth of the lanes lies past the last column
    while block > _LEAST_BLOCK and -N % block > N // 16:
        block //= 2
    tile_rows = min(choice.MAX_TILE_ROWS, elements // block)
    constants = {"N": N, "BLOCK": block, "ROWS": tile_rows}
    constants["FAST"] = _fast(getattr(gate_device, kernel), dtype, architecture)
    warps = choice.count_warps(tile_rows * block) * 32 // architecture.lanes
    return Plan(getattr(gate_device, kernel), constants, warps)


def _fast(kernel: object, dtype: torch.dtype, architecture: Architecture) -> bool:
    """Whether an approximate sigmoid is exact enough, and the compiler knows the instruction."""
    compiled = isinstance(kernel, triton.JITFunction)
    return compiled and dtype.itemsize == 2 and architecture.lanes == 32


def unfit(
    tensors: Mapping[str, Tensor | None],
    weights: Mapping[str, Tensor | None],
    *,
    compute_dtype: torch.dtype = torch.float32,
    dtypes: Sequence[torch.dtype | None] = (),
    group: int = 0,
) -> str | None:
    """Why the kernels cannot take these tensors, in one sentence; None where they can.

    tensors: by name, tensors of one shape [..., N], the first of them not None; weights: tensors
    [N] or None; all fp32, fp16 or bf16, on one GPU. dtypes: what values are rounded to.
    """
    reason = rows.unfit(tensors, weights, compute_dtype=compute_dtype, dtypes=dtypes)
    if reason is not None:
        return reason
    N = next(iter(tensors.values())).shape[-1]
    if group < 0 or (group and N % group):
        return f"{N} columns are no whole number of groups of {group}"
    return None


# ------------------------------------------------------------ without a norm


def silu_gate(
    x: Tensor,
    gate: Tensor,
    *,
    sigmoid_dtype: torch.dtype | None,
    silu_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """y [..., N] = x * silu(gate) of x and gate [..., N].

    `sigmoid_dtype` and `silu_dtype`: what sigmoid(gate) and silu(gate) are rounded to.
    """
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if x.numel() == 0:
        return y
    operands = [Rows.of(x), Rows.of(gate)]
    _launch_elementwise(
        "silu_gate",
        operands,
        [y],
        SIGMOID_DTYPE=rounding(sigmoid_dtype),
        SILU_DTYPE=rounding(silu_dtype),
        PRODUCT_DTYPE=rounding(_product_dtype(x.dtype, silu_dtype)),
    )
    return y


def silu_gate_backward(dys: Sequence[Tensor], x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """dx [..., N] in x's dtype and dgate [..., N] in the gate's.

    dys: one to three [..., N], added with a rounding to their dtype after each addition.
    """
    dx, dgate = _like(x), _like(gate)
    if x.numel() == 0:
        return dx, dgate
    dys = rows.same_dtype(dys)
    operands = [*rows.gradient_rows(dys), Rows.of(x), Rows.of(gate)]
    _launch_elementwise("silu_gate_backward", operands, [dx, dgate])
    return dx, dgate


def _launch_elementwise(
    kernel: str, operands: Sequence[Rows], results: Sequence[Tensor], **constants
) -> None:
    device, N = device_of(results[0]), results[0].shape[-1]
    dtype = widest(*(r.tensor for r in operands), *results)
    cut = plan(kernel, N, dtype, architecture=device.architecture)
    M = results[0].numel() // N
    unit = common_unit(operands)
    arguments = (
        *(r.tensor for r in operands),
        *results,
        M,
        *(r.stride // unit for r in operands),
    )
    constants["STRIDE_UNIT"] = unit
    cut = settle(cut, arguments, constants, device)
    block, tile_rows = cut.constants["BLOCK"], cut.constants["ROWS"]
    launch(cut, triton.cdiv(M, tile_rows) * triton.cdiv(N, block), arguments, constants)


# ------------------------------------------------------------ with a norm


def rms_norm_silu_gate(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    weight_offset: float,
    unit_dtype: torch.dtype | None,
    norm_dtype: torch.dtype | None,
    sigmoid_dtype: torch.dtype | None,
    silu_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """y = x / rms(x) * (weight_offset + weight) * silu(gate) of x and gate [..., N], weight [N].

    `unit_dtype`, `norm_dtype`: what x / rms(x) is rounded to before and after the weight;
    `sigmoid_dtype`, `silu_dtype`: what sigmoid(gate) and silu(gate) are.
    Returns y [..., N] and rstd [...] in fp32.
    """
    scaled = scaled_dtype(unit_dtype, weight, weight_offset)
    y, rstd = _forward(
        "rms_norm_silu_gate",
        x,
        gate,
        weight,
        group=x.shape[-1],
        eps=eps,
        out_dtype=out_dtype,
        WEIGHT_OFFSET=float(weight_offset),
        SIGMOID_DTYPE=rounding(sigmoid_dtype),
        SILU_DTYPE=rounding(silu_dtype),
        PRODUCT_DTYPE=rounding(_product_dtype(norm_dtype or scaled, silu_dtype)),
        GATED_DTYPE=None,
        UNIT_DTYPE=rounding(unit_dtype),
        SCALED_DTYPE=rounding(scaled),
        NORM_DTYPE=rounding(norm_dtype),
    )
    return y, rstd.squeeze(-1)


def rms_norm_silu_gate_backward(
    dys: Sequence[Tensor],
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None,
    *,
    weight_offset: float,
    need_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `rms_norm_silu_gate`.

    dys: one to three [..., N], added with a rounding to their dtype after each addition; rstd:
    [...] in fp32; dres: [..., N] or None, the gradient that x gets elsewhere, added before dx is
    rounded. Returns dx [..., N] in x's dtype, dgate [..., N] in the gate's, and dweight [N] in the
    weight's or None.
    """
    return _backward(
        "rms_norm_silu_gate_backward",
        dys,
        x,
        gate,
        weight,
        rstd,
        dres,
        group=x.shape[-1],
        need_dweight=need_dweight,
        WEIGHT_OFFSET=float(weight_offset),
        **dict.fromkeys(("SIGMOID_DTYPE", "SILU_DTYPE", "PRODUCT_DTYPE", "GATED_DTYPE")),
    )


def silu_gate_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    group: int,
    eps: float,
    weight_offset: float,
    sigmoid_dtype: torch.dtype | None,
    silu_dtype: torch.dtype | None,
    gated_dtype: torch.dtype | None,
    unit_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """y = g / rms(g) * (weight_offset + weight) with g = x * silu(gate), of x and gate [..., N].

    Each run of `group` columns has its own rms; 0 stands for all N. weight: [N] or None.
    `sigmoid_dtype`, `silu_dtype`, `gated_dtype`: what sigmoid(gate), silu(gate) and g are rounded
    to; `unit_dtype`: what g / rms(g) is, before the weight.
    Returns y [..., N] and rstd [..., N / group] in fp32.
    """
    return _forward(
        "silu_gate_rms_norm",
        x,
        gate,
        weight,
        group=group or x.shape[-1],
        eps=eps,
        out_dtype=out_dtype,
        WEIGHT_OFFSET=float(weight_offset),
        SIGMOID_DTYPE=rounding(sigmoid_dtype),
        SILU_DTYPE=rounding(silu_dtype),
        PRODUCT_DTYPE=rounding(_product_dtype(x.dtype, silu_dtype)),
        GATED_DTYPE=rounding(gated_dtype),
        UNIT_DTYPE=rounding(unit_dtype),
        SCALED_DTYPE=rounding(scaled_dtype(unit_dtype, weight, weight_offset)),
        NORM_DTYPE=None,
    )


def silu_gate_rms_norm_backward(
    dys: Sequence[Tensor],
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    group: int,
    sigmoid_dtype: torch.dtype | None,
    silu_dtype: torch.dtype | None,
    gated_dtype: torch.dtype | None,
    weight_offset: float,
    need_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `silu_gate_rms_norm`, with its rstd [..., N / group] and its roundings of g.

    dys: one to three [..., N], added with a rounding to their dtype after each addition. Returns
    dx [..., N] in x's dtype, dgate [..., N] in the gate's, and dweight [N] in the weight's or None.
    """
    return _backward(
        "silu_gate_rms_norm_backward",
        dys,
        x,
        gate,
        weight,
        rstd,
        None,
        group=group or x.shape[-1],
        need_dweight=need_dweight,
        WEIGHT_OFFSET=float(weight_offset),
        SIGMOID_DTYPE=rounding(sigmoid_dtype),
        SILU_DTYPE=rounding(silu_dtype),
        PRODUCT_DTYPE=rounding(_product_dtype(x.dtype, silu_dtype)),
        GATED_DTYPE=rounding(gated_dtype),
    )


def _forward(
    kernel: str,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    group: int,
    eps: float,
    out_dtype: torch.dtype,
    **constants,
) -> tuple[Tensor, Tensor]:
    N = x.shape[-1]
    groups = N // group if group else 1
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    rstd = torch.empty(*x.shape[:-1], groups, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return y, rstd
    operands = [Rows.of(x), Rows.of(gate)]
    device = device_of(x)
    dtype = widest(x, gate, y)
    cut = plan(kernel, N, dtype, group=group, architecture=device.architecture)
    M = x.numel() // N
    unit = common_unit(operands)
    arguments = (
        *(r.tensor for r in operands),
        contiguous(weight),
        y,
        rstd,
        M,
        *(r.stride // unit for r in operands),
        float(eps),
    )
    constants["STRIDE_UNIT"] = unit
    cut = settle(cut, arguments, constants, device)
    launch(cut, triton.cdiv(M, cut.constants["ROWS"]) * groups, arguments, constants)
    return y, rstd


def _backward(
    kernel: str,
    dys: Sequence[Tensor],
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None,
    *,
    group: int,
    need_dweight: bool,
    **constants,
) -> tuple[Tensor, Tensor, Tensor | None]:
    N = x.shape[-1]
    dx, dgate = _like(x), _like(gate)
    need_dweight = need_dweight and weight is not None
    if x.numel() == 0:
        return dx, dgate, torch.zeros_like(weight) if need_dweight else None
    dys = rows.same_dtype(dys)
    operands = [*rows.gradient_rows(dys), Rows.of(x), Rows.of(gate), Rows.of(dres)]
    device = device_of(x)
    cut = plan(
        kernel,
        N,
        widest(*dys, x, gate, dres),
        group=group,
        row_tensors=sum(r.tensor is not None for r in operands),
        architecture=device.architecture,
    )
    M, groups = x.numel() // N, N // group
    unit = common_unit(operands)
    weight_row, rstds = contiguous(weight), rstd.contiguous()
    constants["STRIDE_UNIT"] = unit

    def arguments(partials: Tensor | torch.dtype | None) -> tuple:
        return (
            *(r.tensor for r in operands),
            weight_row,
            rstds,
            dx,
            dgate,
            partials,
            M,
            *(r.stride // unit for r in operands),
        )

    cut = settle(cut, arguments(torch.float32 if need_dweight else None), constants, device)
    programs = count_programs(M, cut, device.multiprocessors, groups)
    partials = None
    if need_dweight:
        partials = torch.empty(programs, N, dtype=torch.float32, device=x.device)
    launch(cut, programs * groups, arguments(partials), constants)
    return dx, dgate, None if partials is None else finalize(partials, weight)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _product_dtype(dtype: torch.dtype | None, silu_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a value times silu(gate), before any rounding that is asked for."""
    return torch.promote_types(dtype or torch.float32, silu_dtype or torch.float32)
