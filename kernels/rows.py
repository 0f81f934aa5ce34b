"""What the launches of all Triton kernels share: tensors as rows, and the launch itself.

How rows are cut never depends on how many there are (see choice.py), only the number of partial
sums of dweight does.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxfuse.kernels import tile_device
from fxfuse.kernels.choice import MAX_TILE_ROWS, Plan

DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
MAX_COLUMNS = 1 << 20
MAX_GRADIENTS = 3

# One program adds up so many rows of dweight: fewer and the partial sums cost more than they
# save, more (in tiles) and a chain of fp32 additions loses too many bits.
_MIN_PROGRAM_ROWS = 4
_MAX_PROGRAM_TILES = 256

_INT32_MAX = 2**31 - 1
_ALIGNMENT = 16  # bytes of the widest load


# ------------------------------------------------------------ what a kernel takes


def unfit(
    rows: Mapping[str, Tensor | None],
    weights: Mapping[str, Tensor | None],
    *,
    compute_dtype: torch.dtype = torch.float32,
    dtypes: Sequence[torch.dtype | None] = (),
) -> str | None:
    """Why the kernels cannot take these tensors, in one sentence; None where they can.

    rows: by name, tensors of one shape [..., N], the first of them not None; weights: tensors [N];
    all fp32, fp16 or bf16, on one GPU; dtypes: what the kernel shall round to, None for nothing.
    """
    (first, x), *others = rows.items()
    if x.dim() == 0:
        return f"the {first} has no last dimension"
    if compute_dtype != torch.float32:
        return f"the kernel computes in float32, not in {dtype_name(compute_dtype)}"
    for dtype in dtypes:
        if dtype is not None and dtype not in DTYPES:
            return f"the kernel does not round to {dtype_name(dtype)}"
    N = x.shape[-1]
    if not 0 < N <= MAX_COLUMNS:
        return f"the kernel takes 1 to {MAX_COLUMNS} columns, not {N}"
    for name, t in others:
        if t is not None and t.shape != x.shape:
            return f"the {name}'s shape {list(t.shape)} is not the {first}'s {list(x.shape)}"
    for name, t in weights.items():
        if t is not None and t.shape != (N,):
            return f"the {name}'s shape {list(t.shape)} is not one value for each of {N} columns"
    for name, t in (*rows.items(), *weights.items()):
        reason = None if t is None else _unfit_tensor(name, t, first, x.device)
        if reason is not None:
            return reason
    return None


def _unfit_tensor(name: str, tensor: Tensor, first: str, device: torch.device) -> str | None:
    if tensor.dtype not in DTYPES:
        return f"the {name} is {dtype_name(tensor.dtype)}, which the kernel does not take"
    if tensor.device != device:
        return f"the {name} is on {tensor.device}, the {first} on {device}"
    if tensor.layout != torch.strided:
        return f"the {name} is not a strided tensor"
    if not (tensor.is_cuda or (tensor.device.type == "cpu" and _interpreted())):
        return f"the kernel runs on CUDA devices, the {name} is on {tensor.device}"
    if _misaligned(tensor):
        return f"the {name} does not begin at a {_ALIGNMENT}-byte boundary"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _interpreted() -> bool:
    return not isinstance(tile_device.load, triton.JITFunction)


# ------------------------------------------------------------ launches


def count_programs(M: int, cut: Plan, multiprocessors: int, groups: int = 1) -> int:
    """How many programs share M rows in the backward, and so how many partial sums there are.

    groups: how many such sets of programs run at once.
    """
    rows = cut.constants["ROWS"]
    tiles = triton.cdiv(M, rows)
    limit = max(1, cut.resident * multiprocessors // (groups * cut.clusters))
    waves = max(1, triton.cdiv(tiles, limit * _MAX_PROGRAM_TILES))
    programs = min(waves * limit, triton.cdiv(M, max(rows, _MIN_PROGRAM_ROWS)))
    # as many programs as finish together
    return triton.cdiv(tiles, triton.cdiv(tiles, programs))


def launch(
    cut: Plan, programs: int, arguments: Sequence[Any], constants: Mapping[str, Any]
) -> None:
    """Every launch of a kernel goes through here."""
    with torch.cuda.device_of(arguments[0]):
        cut.kernel[(programs,)](*arguments, **cut.constants, **constants, **cut.options)


# ------------------------------------------------------------ what is rounded


def scaled_dtype(
    unit_dtype: torch.dtype | None, weight: Tensor | None, weight_offset: float
) -> torch.dtype:
    """The dtype of a normalised value times its weight, before any rounding asked for."""
    dtype = unit_dtype or torch.float32
    if weight is None:
        return dtype
    return torch.promote_types(dtype, torch.float32 if weight_offset else weight.dtype)


def rounding(dtype: torch.dtype | None) -> Any:
    """What a kernel is told to round fp32 to; None where that changes nothing."""
    return None if dtype in (None, torch.float32) else DTYPES[dtype]


# ------------------------------------------------------------ tensors


@dataclass(frozen=True)
class Rows:
    """A tensor whose rows lie `stride` elements apart, each of them contiguous."""

    tensor: Tensor | None
    stride: int

    @classmethod
    def of(cls, tensor: Tensor | None) -> "Rows":
        if tensor is None:
            return cls(None, 0)
        stride = row_stride(tensor)
        # offsets within a tile of rows are 32-bit
        if stride is None or stride * MAX_TILE_ROWS > _INT32_MAX or _misaligned(tensor):
            return cls(_copy(tensor), tensor.shape[-1])
        return cls(tensor, stride)


def gradient_rows(dys: Sequence[Tensor]) -> list[Rows]:
    """One to three gradients, as many as a kernel takes: the rest are None."""
    return [Rows.of(dy) for dy in (*dys, *[None] * (MAX_GRADIENTS - len(dys)))]


def same_dtype(dys: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradients, added up beforehand where their dtypes differ."""
    if not 0 < len(dys) <= MAX_GRADIENTS:
        raise ValueError(f"backward takes 1 to {MAX_GRADIENTS} gradients, not {len(dys)}")
    if len({dy.dtype for dy in dys}) == 1:
        return dys
    return [functools.reduce(torch.add, dys)]


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


def common_unit(rows: Sequence[Rows]) -> int:
    """The part of all row strides, up to 8, that the kernels are told at compile time."""
    return math.gcd(8, *(r.stride for r in rows))


def widest(*tensors: Tensor | None) -> torch.dtype:
    return max((t.dtype for t in tensors if t is not None), key=lambda dtype: dtype.itemsize)


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
