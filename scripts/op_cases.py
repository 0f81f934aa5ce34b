"""The ops that gpu_check and benchmark look at, each with the plain ops that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import fxfuse.kernels.ops  # noqa: F401 (defines the ops)

OPS = torch.ops.fxfuse
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 1e-6
MOST_GRADIENTS = 3
Tensors = tuple[Tensor, ...]


def double(*operands: Tensor) -> list[Tensor]:
    return [t.double() for t in operands]


@dataclass(frozen=True)
class Case:
    """One op, and what it is compared with.

    rows, weights: the names of its operands [M, N] and [N]; all the functions take them in this
    order. chain: the plain ops; returns y and, where the op takes a residual gradient, the tensor
    that it belongs to. op: our op; returns y, or both. backward: takes the operands and returns
    the inner backward op as a function of the gradients of y and the residual gradient. exact: the
    operands in fp64 for which the chain computes what is exact.
    reads, writes: how many tensors [M, N] must at least be moved, (forward, backward), with one
    gradient for each result. widths, timed: of the checks, by dtype, and of the timings in bf16.
    residual: whether there can be a residual gradient. results: how many tensors the op returns.
    statistics: fp32 numbers that are saved for each row.
    """

    name: str
    rows: tuple[str, ...]
    weights: tuple[str, ...]
    chain: Callable[..., Tensors]
    op: Callable[..., Tensors]
    backward: Callable[..., Callable[[list[Tensor], Tensor | None], Tensors]]
    reads: tuple[int, int]
    writes: tuple[int, int]
    widths: dict[torch.dtype, tuple[int, ...]]
    timed: tuple[int, ...]
    residual: bool = True
    results: int = 1
    exact: Callable[..., list[Tensor]] = double
    statistics: int = 1

    @property
    def operands(self) -> tuple[str, ...]:
        return self.rows + self.weights

    @property
    def gated(self) -> bool:
        return "gate" in self.rows

    def mix(self, gradients: int = 0) -> tuple[int, int]:
        """Tensors [M, N] that are read and written, forward or with so many gradients of y."""
        if not gradients:
            return self.reads[0], self.writes[0]
        return self.reads[1] + gradients - 1, self.writes[1]

    def mixes(self) -> list[tuple[int, int]]:
        return [self.mix(gradients) for gradients in (0, 1, MOST_GRADIENTS)]

    def least_bytes(self, M: int, N: int, itemsize: int, gradients: int = 0) -> int:
        """The fewest bytes that forward or backward must move, for operands of so many bytes."""
        weights = len(self.weights) * N * (2 * itemsize if gradients else itemsize)
        return sum(self.mix(gradients)) * M * N * itemsize + 4 * self.statistics * M + weights


# --- RMSNorm, with a residual add in front or readers of its input behind ----------------------

NORM = {"eps": EPS, "out_dtype": "input"}


def norm_chain(x: Tensor, weight: Tensor) -> Tensors:
    return F.rms_norm(x, x.shape[-1:], weight, EPS), x


def norm_op(x: Tensor, weight: Tensor) -> Tensors:
    return (OPS.rms_norm(x, weight, **NORM),)


def fork_op(x: Tensor, weight: Tensor) -> Tensors:
    return OPS.rms_norm_fork(x, weight, **NORM)


def norm_backward(x: Tensor, weight: Tensor) -> Callable:
    _, rstd = OPS.rms_norm_fwd(x, weight, **NORM)
    return lambda dys, dres: OPS.rms_norm_bwd(dys, x, weight, rstd, dres, need_dweight=True)


def add_chain(x: Tensor, residual: Tensor, weight: Tensor) -> Tensors:
    h = x + residual
    return F.rms_norm(h, h.shape[-1:], weight, EPS), h


def add_op(x: Tensor, residual: Tensor, weight: Tensor) -> Tensors:
    return OPS.add_rms_norm(x, residual, weight, **NORM)


def add_backward(x: Tensor, residual: Tensor, weight: Tensor) -> Callable:
    _, h, rstd = OPS.add_rms_norm_fwd(x, residual, weight, **NORM)

    def backward(dys: list[Tensor], dres: Tensor | None) -> Tensors:
        dh, dweight = OPS.rms_norm_bwd(dys, h, weight, rstd, dres, need_dweight=True)
        return dh, dh, dweight

    return backward


def with_rounded_sum(x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
    """Operands whose sum is the rounded one: that is what the op says it normalises."""
    h = (x + residual).double()
    return [h - residual.double(), residual.double(), weight.double()]


# --- gates ---------------------------------------------------------------------------------


def unit(x: Tensor) -> Tensor:
    """x / rms(x) [M, N], in at least fp32."""
    x = at_least_fp32(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, FP32))


SILU = {"silu_dtype": "gate", "out_dtype": ""}
NORM_SILU = {"eps": EPS, "unit_dtype": "input", "norm_dtype": "input"}


def silu_chain(x: Tensor, gate: Tensor) -> Tensors:
    return (F.silu(gate) * x,)


def silu_op(x: Tensor, gate: Tensor) -> Tensors:
    return (OPS.silu_gate(x, gate, **SILU),)


def silu_backward(x: Tensor, gate: Tensor) -> Callable:
    return lambda dys, _: OPS.silu_gate_bwd(dys, x, gate)


def norm_silu_chain(x: Tensor, gate: Tensor, weight: Tensor) -> Tensors:
    normed = weight * unit(x).to(x.dtype)
    return (normed * F.silu(at_least_fp32(gate))).to(x.dtype), x


def norm_silu_op(x: Tensor, gate: Tensor, weight: Tensor) -> Tensors:
    return (OPS.rms_norm_silu_gate(x, gate, weight, **NORM_SILU),)


def norm_silu_backward(x: Tensor, gate: Tensor, weight: Tensor) -> Callable:
    _, rstd = OPS.rms_norm_silu_gate_fwd(x, gate, weight, **NORM_SILU)
    return lambda dys, dres: OPS.rms_norm_silu_gate_bwd(
        dys, x, gate, weight, rstd, dres, need_dweight=True
    )


def silu_norm_case(groups: int, timed: tuple[int, ...]) -> Case:
    """The norm after the gate, over `groups` equal runs of columns."""

    def chain(x: Tensor, gate: Tensor, weight: Tensor) -> Tensors:
        gated = at_least_fp32(x) * F.silu(at_least_fp32(gate))
        normed = unit(gated.unflatten(-1, (groups, -1))).flatten(-2)
        return (weight * normed.to(x.dtype),)

    def op(x: Tensor, gate: Tensor, weight: Tensor) -> Tensors:
        group = x.shape[-1] // groups
        return (OPS.silu_gate_rms_norm(x, gate, weight, group=group, eps=EPS, unit_dtype="input"),)

    def backward(x: Tensor, gate: Tensor, weight: Tensor) -> Callable:
        group = x.shape[-1] // groups
        norm = {"group": group, "eps": EPS, "unit_dtype": "input"}
        _, rstd = OPS.silu_gate_rms_norm_fwd(x, gate, weight, **norm)
        return lambda dys, _: OPS.silu_gate_rms_norm_bwd(
            dys, x, gate, weight, rstd, group=group, need_dweight=True
        )

    name = f"silu_gate_rms_norm, {groups} groups" if groups > 1 else "silu_gate_rms_norm"
    return Case(
        name, ("x", "gate"), ("weight",), chain, op, backward,
        reads=(2, 3), writes=(1, 2), widths=WIDTHS, timed=timed, residual=False, statistics=groups,
    )  # fmt: skip


# --- norm, add, norm -----------------------------------------------------------------------

SANDWICH = {
    "eps1": EPS, "eps2": EPS, "weight_offset1": 1.0, "weight_offset2": 1.0,
    "norm_dtype1": "input", "out_dtype": "input",
}  # fmt: skip


def sandwich_chain(x: Tensor, residual: Tensor, weight1: Tensor, weight2: Tensor) -> Tensors:
    h = residual + (unit(x) * (1.0 + at_least_fp32(weight1))).to(x.dtype)
    return (unit(h) * (1.0 + at_least_fp32(weight2))).to(h.dtype), h


def sandwich_op(x: Tensor, residual: Tensor, weight1: Tensor, weight2: Tensor) -> Tensors:
    return OPS.rms_norm_add_rms_norm(x, residual, weight1, weight2, **SANDWICH)


def sandwich_backward(x: Tensor, residual: Tensor, weight1: Tensor, weight2: Tensor) -> Callable:
    weights = (weight1, weight2)
    _, h, *rstds = OPS.rms_norm_add_rms_norm_fwd(x, residual, *weights, **SANDWICH)
    return lambda dys, dres: OPS.rms_norm_add_rms_norm_bwd(
        dys, x, h, *weights, *rstds, dres,
        weight_offset1=1.0, weight_offset2=1.0, need_dweight1=True, need_dweight2=True,
    )  # fmt: skip


# --- the table -----------------------------------------------------------------------------

WIDTHS = dict.fromkeys((BF16, FP16, FP32), (64, 128, 1024, 2880, 4096, 8192))
WIDTHS |= {BF16: (64, 96, 128, 256, 512, 1024, 2880, 4096, 8192, 16384)}
NORM_WIDTHS = {dtype: (*widths, 40960) for dtype, widths in WIDTHS.items()}
NORM_WIDTHS |= {
    BF16: (64, 96, 128, 256, 512, 1000, 1024, 2880, 4096, 5120, 7168, 8192, 16384, 40960)
}
GATE_WIDTHS = {dtype: (*widths, 11008) for dtype, widths in WIDTHS.items()}
WIDE = (2048, 4096, 8192, 16384)

CASES = {
    case.name: case
    for case in (
        Case(
            "rms_norm", ("x",), ("weight",), norm_chain, norm_op, norm_backward,
            reads=(1, 2), writes=(1, 1), widths=NORM_WIDTHS, timed=(64, 128, 256, 512, 4096),
        ),
        Case(
            "rms_norm_fork", ("x",), ("weight",), norm_chain, fork_op, norm_backward,
            reads=(1, 3), writes=(1, 1), widths=WIDTHS, timed=(), results=2,
        ),
        Case(
            "add_rms_norm", ("x", "residual"), ("weight",), add_chain, add_op, add_backward,
            reads=(2, 3), writes=(2, 1), widths=NORM_WIDTHS,
            timed=(128, 1024, 2880, 5120, *WIDE), exact=with_rounded_sum, results=2,
        ),
        Case(
            "silu_gate", ("x", "gate"), (), silu_chain, silu_op, silu_backward,
            reads=(2, 3), writes=(1, 2), widths=GATE_WIDTHS, timed=(11008,),
            residual=False, statistics=0,
        ),
        Case(
            "rms_norm_silu_gate", ("x", "gate"), ("weight",),
            norm_silu_chain, norm_silu_op, norm_silu_backward,
            reads=(2, 3), writes=(1, 2), widths=WIDTHS, timed=(64, 128, 256, 512, *WIDE),
        ),
        silu_norm_case(1, timed=(1024, 4096)),
        silu_norm_case(8, timed=(8192,)),
        Case(
            "rms_norm_add_rms_norm", ("x", "residual"), ("weight1", "weight2"),
            sandwich_chain, sandwich_op, sandwich_backward,
            reads=(2, 4), writes=(2, 2), widths=WIDTHS, timed=(2880, 4096, 8192), results=2,
            statistics=2,
        ),
    )
}  # fmt: skip
