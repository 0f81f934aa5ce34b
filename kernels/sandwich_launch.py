"""Launches the kernels of norm, add, norm: what they take, how they are cut, and the calls.

Throughout, dtypes that a value is rounded to may be None for no rounding. Results are contiguous
and new.
"""

import functools
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from fxfuse.kernels import choice, rms_norm_launch, rows, sandwich_device
from fxfuse.kernels.choice import DEFAULT, Architecture, Plan, device_of, ladder
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
    "fits_one_kernel",
    "plan",
    "rms_norm_add_rms_norm",
    "rms_norm_add_rms_norm_backward",
    "unfit",
]

unfit = rows.unfit

# The widest block of columns that one tile holds, by the bytes of an element, and in the backward
# the widest rows that one kernel takes: with more, registers would be spilled. The forward walks
# wider rows in chunks.
_WIDEST = {"forward": {2: 16384, 4: 8192}, "backward": {2: 4096, 4: 4096}}
_CHUNK = 8192
# Bytes of each tensor in a tile of several rows, and elements of a tensor that one thread holds.
_TILE_BYTES = {"forward": 4096, "backward": 2048}
_THREAD_ELEMENTS = {"forward": 16, "backward": 8}


@functools.cache
def plan(
    kernel: str,
    N: int,
    dtype: torch.dtype,
    *,
    row_tensors: int = 4,
    architecture: Architecture = DEFAULT,
) -> Plan:
    """How a kernel ("forward" or "backward") is cut for rows of N columns.

    dtype: the widest dtype among the tensors of M rows.
    row_tensors: how many tensors of M rows the kernel reads.
    """
    limit = _WIDEST[kernel][dtype.itemsize]
    block, tile_rows = choice.tile_of(N, dtype.itemsize, limit, _CHUNK, _TILE_BYTES[kernel])
    wide = block < N
    device_kernel = getattr(sandwich_device, f"{kernel}_wide" if wide else kernel)
    constants = {"N": N, "BLOCK": block, "ROWS": tile_rows}
    warps = choice.count_warps(tile_rows * block, _THREAD_ELEMENTS[kernel])
    if kernel == "forward":
        return Plan(device_kernel, constants, warps * 32 // architecture.lanes)
    turn_bytes = row_tensors * tile_rows * block * dtype.itemsize
    first = choice.looped(device_kernel, constants, warps, turn_bytes, architecture)
    return ladder([first, *choice.spread(first, dtype.itemsize, architecture)])


def fits_one_kernel(N: int, dtype: torch.dtype) -> bool:
    """Whether one kernel computes the backward for rows of N columns, of this dtype at most."""
    return triton.next_power_of_2(N) <= _WIDEST["backward"][dtype.itemsize]


def rms_norm_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight1: Tensor | None,
    weight2: Tensor | None,
    *,
    eps1: float,
    eps2: float,
    weight_offset1: float,
    weight_offset2: float,
    unit_dtype1: torch.dtype | None,
    norm_dtype1: torch.dtype | None,
    h_dtype: torch.dtype,
    unit_dtype2: torch.dtype | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h = residual + rms_norm(x; weight1) in `h_dtype`, y = rms_norm(h; weight2) in `out_dtype`.

    x, residual: [..., N]; weights: [N] or None. A norm is x / rms(x), rounded to its `unit_dtype`,
    times weight_offset + weight; the first one is then rounded to `norm_dtype1`.
    Returns y and h [..., N], and the rstd [...] of x and of h in fp32.
    """
    N = x.shape[-1]
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    h = torch.empty(x.shape, dtype=h_dtype, device=x.device)
    rstd1, rstd2 = (
        torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2)
    )
    if x.numel() == 0:
        return y, h, rstd1, rstd2

    operands = [Rows.of(x), Rows.of(residual)]
    device = device_of(x)
    cut = plan("forward", N, widest(x, residual, y, h), architecture=device.architecture)
    M = x.numel() // N
    unit = common_unit(operands)
    arguments = (
        *(r.tensor for r in operands),
        contiguous(weight1),
        contiguous(weight2),
        y,
        h,
        rstd1,
        rstd2,
        M,
        *(r.stride // unit for r in operands),
        float(eps1),
        float(eps2),
    )
    constants = {
        "STRIDE_UNIT": unit,
        "WEIGHT_OFFSET1": float(weight_offset1),
        "WEIGHT_OFFSET2": float(weight_offset2),
        "UNIT_DTYPE1": rounding(unit_dtype1),
        "SCALED_DTYPE1": rounding(scaled_dtype(unit_dtype1, weight1, weight_offset1)),
        "NORM_DTYPE1": rounding(norm_dtype1),
        "UNIT_DTYPE2": rounding(unit_dtype2),
        "SCALED_DTYPE2": rounding(scaled_dtype(unit_dtype2, weight2, weight_offset2)),
    }
    cut = settle(cut, arguments, constants, device)
    launch(cut, triton.cdiv(M, cut.constants["ROWS"]), arguments, constants)
    return y, h, rstd1, rstd2


def rms_norm_add_rms_norm_backward(
    dys: Sequence[Tensor],
    x: Tensor,
    h: Tensor,
    weight1: Tensor | None,
    weight2: Tensor | None,
    rstd1: Tensor,
    rstd2: Tensor,
    dres: Tensor | None,
    *,
    weight_offset1: float,
    weight_offset2: float,
    need_dweight1: bool,
    need_dweight2: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `rms_norm_add_rms_norm`.

    dys: one to three [..., N], added with a rounding to their dtype after each addition; rstd1,
    rstd2: [...] in fp32; dres: [..., N] or None, the gradient that h gets elsewhere, added before
    dh is rounded. Where rows are too wide for one kernel, each norm has its own, and the first
    norm's starts from the rounded dh.
    Returns dx [..., N] in x's dtype, dh [..., N] in h's (the gradient of the residual too), and
    dweight1 and dweight2 [N] in the weights' dtypes, or None.
    """
    need_dweight1 = need_dweight1 and weight1 is not None
    need_dweight2 = need_dweight2 and weight2 is not None
    if x.numel() and not fits_one_kernel(x.shape[-1], widest(*dys, x, h, dres)):
        dh, dweight2 = rms_norm_launch.backward(
            dys, h, weight2, rstd2, dres, weight_offset=weight_offset2, need_dweight=need_dweight2
        )
        dx, dweight1 = rms_norm_launch.backward(
            [dh], x, weight1, rstd1, None, weight_offset=weight_offset1, need_dweight=need_dweight1
        )
        return dx, dh, dweight1, dweight2

    N = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    weights = (weight1 if need_dweight1 else None, weight2 if need_dweight2 else None)
    if x.numel() == 0:
        return dx, dh, *(None if w is None else torch.zeros_like(w) for w in weights)

    dys = rows.same_dtype(dys)
    operands = [*rows.gradient_rows(dys), Rows.of(x), Rows.of(h), Rows.of(dres)]
    device = device_of(x)
    cut = plan(
        "backward",
        N,
        widest(*dys, x, h, dres),
        row_tensors=sum(r.tensor is not None for r in operands),
        architecture=device.architecture,
    )
    M = x.numel() // N
    unit = common_unit(operands)
    fixed = (contiguous(weight1), contiguous(weight2), rstd1.contiguous(), rstd2.contiguous())
    constants = {
        "STRIDE_UNIT": unit,
        "WEIGHT_OFFSET1": float(weight_offset1),
        "WEIGHT_OFFSET2": float(weight_offset2),
    }

    def arguments(partials: Sequence[Tensor | torch.dtype | None]) -> tuple:
        return (
            *(r.tensor for r in operands),
            *fixed,
            dx,
            dh,
            *partials,
            M,
            *(r.stride // unit for r in operands),
        )

    kinds = [None if w is None else torch.float32 for w in weights]
    cut = settle(cut, arguments(kinds), constants, device)
    programs = count_programs(M, cut, device.multiprocessors)
    partials = [
        None if w is None else torch.empty(programs, N, dtype=torch.float32, device=x.device)
        for w in weights
    ]
    launch(cut, programs, arguments(partials), constants)
    dweights = (
        None if p is None else rms_norm_launch.finalize(p, w) for p, w in zip(partials, weights)
    )
    return dx, dh, *dweights
