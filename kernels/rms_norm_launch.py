"""Launches the RMSNorm kernels: what they take, how they are cut into programs, and the calls.

The cut depends on the width, the dtype and the device, never on the number of rows M, so a row's
result does not depend on the rows beside it. Only the number of partial sums of dweight does.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxfuse.kernels import rms_norm_device

DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
MAX_COLUMNS = 1 << 20
MAX_GRADIENTS = 3

# The widest block of columns that one tile holds, by the bytes of an element; wider rows are
# walked in chunks of the second number.
_WIDEST = {
    "forward": ({2: 32768, 4: 16384}, 8192),
    "backward": ({2: 8192, 4: 8192}, 4096),
}
# Up to this many columns a tile has several rows: this many bytes of each tensor.
_NARROW_COLUMNS = 512
_NARROW_TILE_BYTES = 4096
_MAX_TILE_ROWS = 128
# Elements of a tensor that one thread holds.
_THREAD_ELEMENTS = 16
# Backward programs on one multiprocessor, for blocks of at most so many columns.
_RESIDENT = {1024: 8, 2048: 4, 4096: 2}
# One program adds up so many rows of dweight: fewer and the partial sums cost more than they
# save, more (in tiles) and a chain of fp32 additions loses too many bits.
_MIN_PROGRAM_ROWS = 4
_MAX_PROGRAM_TILES = 256

_INT32_MAX = 2**31 - 1
_ALIGNMENT = 16  # bytes of the widest load
# Stand-ins for a device's properties where Triton's interpreter runs on the CPU.
_INTERPRETER_MULTIPROCESSORS = 2
_SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True)
class Plan:
    """A kernel with what its width and dtype decide: constants, warps, resident programs."""

    kernel: Any
    constants: dict[str, int]
    num_warps: int
    resident: int = 0


@functools.cache
def plan(
    kernel: str,
    N: int,
    dtype: torch.dtype,
    *,
    row_tensors: int = 2,
    shared_memory: int = _SHARED_MEMORY,
) -> Plan:
    """How a kernel ("forward", "backward" or "finalize") is cut for rows of N columns.

    dtype: the widest dtype among the tensors of M rows; fp32 for "finalize".
    row_tensors: how many tensors of M rows the kernel reads.
    shared_memory: bytes that one program may use.
    """
    if kernel == "finalize":
        return _plan_finalize(N)
    block = triton.next_power_of_2(N)
    widest, chunk = _WIDEST[kernel]
    wide = block > widest[dtype.itemsize]
    block = chunk if wide else block
    rows = 1
    if block <= _NARROW_COLUMNS:
        rows = min(_MAX_TILE_ROWS, _NARROW_TILE_BYTES // dtype.itemsize // block)
    constants = {"N": N, "BLOCK": block, "ROWS": rows}
    if kernel == "backward":
        # Three stages keep a tile in flight behind the one in use (two in the chunked kernel,
        # which also buffers the weight). Two stages would overlap nothing: rather one.
        buffers = 3 * (row_tensors + 1) if wide else 2 * row_tensors
        in_flight = buffers * rows * block * dtype.itemsize
        constants["STAGES"] = 3 if in_flight + 2048 <= shared_memory else 1
    return Plan(
        kernel=getattr(rms_norm_device, f"{kernel}_wide" if wide else kernel),
        constants=constants,
        num_warps=min(32, max(4, rows * block // (32 * _THREAD_ELEMENTS))),
        resident=next((count for width, count in _RESIDENT.items() if block <= width), 1),
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
    if x.dim() == 0:
        return "the input has no last dimension"
    if compute_dtype != torch.float32:
        return f"the kernel computes in float32, not in {_name(compute_dtype)}"
    if unit_dtype is not None and unit_dtype not in DTYPES:
        return f"the kernel does not round to {_name(unit_dtype)}"
    N = x.shape[-1]
    if not 0 < N <= MAX_COLUMNS:
        return f"the kernel takes 1 to {MAX_COLUMNS} columns, not {N}"
    if residual is not None and residual.shape != x.shape:
        return f"the residual's shape {list(residual.shape)} is not the input's {list(x.shape)}"
    if weight is not None and weight.shape != (N,):
        return f"the weight's shape {list(weight.shape)} is not one value for each of {N} columns"
    for name, tensor in (("input", x), ("residual", residual), ("weight", weight)):
        reason = None if tensor is None else _unfit_tensor(name, tensor, x.device)
        if reason is not None:
            return reason
    return None


def _unfit_tensor(name: str, tensor: Tensor, device: torch.device) -> str | None:
    if tensor.dtype not in DTYPES:
        return f"the {name} is {_name(tensor.dtype)}, which the kernel does not take"
    if tensor.device != device:
        return f"the {name} is on {tensor.device}, the input on {device}"
    if tensor.layout != torch.strided:
        return f"the {name} is not a strided tensor"
    if not (tensor.is_cuda or (tensor.device.type == "cpu" and _interpreted())):
        return f"the kernel runs on CUDA devices, the {name} is on {tensor.device}"
    if tensor.data_ptr() % _ALIGNMENT:
        return f"the {name} does not begin at a {_ALIGNMENT}-byte boundary"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _interpreted() -> bool:
    return not isinstance(rms_norm_device.forward, triton.JITFunction)


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

    rows = [_Rows.of(x), _Rows.of(residual)]
    cut = plan("forward", N, _widest(x, residual, y))
    M = x.numel() // N
    unit = _common_unit(rows)
    launch(
        cut,
        triton.cdiv(M, cut.constants["ROWS"]),
        *(r.tensor for r in rows),
        _contiguous(weight),
        y,
        h,
        rstd,
        M,
        *(r.stride // unit for r in rows),
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

    dys = _same_dtype(dys)
    padding = [None] * (MAX_GRADIENTS - len(dys))
    gradients = [_Rows.of(dy) for dy in (*dys, *padding)]
    rows = [*gradients, _Rows.of(h), _Rows.of(dres)]
    properties = _properties(h.device)
    cut = plan(
        "backward",
        N,
        _widest(*dys, h, dres),
        row_tensors=sum(r.tensor is not None for r in rows),
        shared_memory=properties.shared_memory,
    )
    M = h.numel() // N
    programs = count_programs(M, cut, properties.multiprocessors)
    partials = None
    if need_dweight:
        partials = torch.empty(programs, N, dtype=torch.float32, device=h.device)
    unit = _common_unit(rows)
    launch(
        cut,
        programs,
        *(r.tensor for r in rows[:4]),
        _contiguous(weight),
        rstd.contiguous(),
        rows[4].tensor,
        dh,
        partials,
        M,
        *(r.stride // unit for r in rows),
        STRIDE_UNIT=unit,
        WEIGHT_OFFSET=float(weight_offset),
    )
    if partials is None:
        return dh, None
    return dh, _finalize(partials, weight)


def _finalize(partials: Tensor, weight: Tensor) -> Tensor:
    programs, N = partials.shape
    dweight = torch.empty(N, dtype=weight.dtype, device=weight.device)
    cut = plan("finalize", N, partials.dtype)
    launch(cut, triton.cdiv(N, cut.constants["BLOCK"]), partials, dweight, programs)
    return dweight


def launch(cut: Plan, programs: int, *arguments: Any, **constants: Any) -> None:
    """Every launch of a kernel goes through here."""
    with torch.cuda.device_of(arguments[0]):
        cut.kernel[(programs,)](
            *arguments,
            **cut.constants,
            **constants,
            num_warps=cut.num_warps,
            # the default differs between Triton's versions, and with it the bits
            enable_fp_fusion=True,
        )


def count_programs(M: int, cut: Plan, multiprocessors: int) -> int:
    """How many programs share M rows in the backward, and so how many partial sums there are."""
    rows = cut.constants["ROWS"]
    tiles = triton.cdiv(M, rows)
    limit = cut.resident * multiprocessors
    waves = max(1, triton.cdiv(tiles, limit * _MAX_PROGRAM_TILES))
    programs = min(waves * limit, triton.cdiv(M, max(rows, _MIN_PROGRAM_ROWS)))
    # as many programs as finish together
    return triton.cdiv(tiles, triton.cdiv(tiles, programs))


@dataclass(frozen=True)
class _Device:
    multiprocessors: int
    shared_memory: int


@functools.cache
def _properties(device: torch.device) -> _Device:
    if device.type != "cuda":
        return _Device(_INTERPRETER_MULTIPROCESSORS, _SHARED_MEMORY)
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", 0) or found.shared_memory_per_block
    return _Device(found.multi_processor_count, shared)


def _same_dtype(dys: Sequence[Tensor]) -> Sequence[Tensor]:
    if not 0 < len(dys) <= MAX_GRADIENTS:
        raise ValueError(f"backward takes 1 to {MAX_GRADIENTS} gradients, not {len(dys)}")
    if len({dy.dtype for dy in dys}) == 1:
        return dys
    return [functools.reduce(torch.add, dys)]


def _widest(*tensors: Tensor | None) -> torch.dtype:
    return max((t.dtype for t in tensors if t is not None), key=lambda dtype: dtype.itemsize)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


@dataclass(frozen=True)
class _Rows:
    """A tensor whose rows lie `stride` elements apart, each of them contiguous."""

    tensor: Tensor | None
    stride: int

    @classmethod
    def of(cls, tensor: Tensor | None) -> "_Rows":
        if tensor is None:
            return cls(None, 0)
        stride = row_stride(tensor)
        # offsets within a tile of rows are 32-bit
        if stride is None or stride * _MAX_TILE_ROWS > _INT32_MAX or _misaligned(tensor):
            return cls(_copy(tensor), tensor.shape[-1])
        return cls(tensor, stride)


def _misaligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % _ALIGNMENT != 0


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def row_stride(tensor: Tensor) -> int | None:
    """Elements between the rows of [..., N], where one number says it and rows are contiguous."""
    *sizes, columns = tensor.shape
    *strides, step = tensor.stride()
    if columns > 1 and step != 1:
        return None
    dims = [(size, stride) for size, stride in zip(sizes, strides) if size != 1]
    if not dims:
        return columns
    for (_, outer), (size, inner) in itertools.pairwise(dims):
        if outer != size * inner:
            return None
    return dims[-1][1]


def _common_unit(rows: Sequence[_Rows]) -> int:
    """The part of all row strides, up to 8, that the kernels are told at compile time."""
    return math.gcd(8, *(r.stride for r in rows))
