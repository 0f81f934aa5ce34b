"""Tensors of more than 2**31 elements: each row of the results, against fp64 and plain ops.

Both are computed for some rows at a time. Offsets that wrap at 32 bits, signed or not, would leave
rows full of NaN, or put there what belongs elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from gpu_numbers import Inputs, Results, Setting, by_chain, by_op, draw
from op_cases import BF16, CASES, Case
from torch import Tensor

# The row that is farthest off may be so many times as far off as the chain's farthest: a row of
# another place is a hundred times farther.
FACTOR = 2.0


@dataclass(frozen=True)
class Large:
    """A case with operands [M, N] in bf16; M N is more than 2**31, for the first ones 2**32."""

    case: Case
    M: int
    N: int

    def __str__(self) -> str:
        return f"{self.case.name}, {self.M} x {self.N}"


def sizes(dry: bool) -> Iterator[Large]:
    """One of each family of kernels, then rows so narrow that a tile has several, then chunks."""
    names = (
        "add_rms_norm", "rms_norm_silu_gate", "silu_gate_rms_norm, 8 groups", "silu_gate",
        "rms_norm_add_rms_norm",
    )  # fmt: skip
    for name in names:
        yield Large(CASES[name], 67 if dry else (1 << 20) + 3, 128 if dry else 4096)
    for name in ("rms_norm", "rms_norm_silu_gate"):
        yield Large(CASES[name], 259 if dry else (1 << 24) + 3, 32 if dry else 128)
    yield Large(CASES["rms_norm"], 5 if dry else (1 << 16) + 3, 9000 if dry else 32768)


def failures_of(large: Large, device: str, chunk: int) -> Iterator[str]:
    """What is wrong with the results of one call; `chunk` elements are compared at a time."""
    case, M, N = large.case, large.M, large.N
    inputs = draw(case, Setting(M, N, BF16, residual=case.results == 2), device)
    found = by_op(case, inputs)
    sums = Sums()
    rows = max(1, chunk // N)
    for start in range(0, M, rows):
        part = part_of(inputs, case, slice(start, start + rows))
        exact, plain = by_chain(case, part, exact=True), by_chain(case, part)
        for name in found.keys() & exact.keys():
            if is_sum(name):
                sums.add(name, exact[name], plain[name])
            else:
                own = found[name][start : start + rows]
                yield from wrong(name, own, exact[name], plain[name], f"rows from {start}, ")
    for name in sums.exact:
        yield from wrong(name, found[name], sums.exact[name], sums.plain[name], "")


class Sums:
    """The gradients of the weights: those of the parts, added up in fp64."""

    def __init__(self) -> None:
        self.exact: Results = {}
        self.plain: Results = {}

    def add(self, name: str, exact: Tensor, plain: Tensor) -> None:
        for kept, more in ((self.exact, exact), (self.plain, plain)):
            kept[name] = kept.get(name, 0) + more.double()


def is_sum(name: str) -> bool:
    return name.startswith("dweight")


def part_of(inputs: Inputs, case: Case, rows: slice) -> Inputs:
    count = len(case.rows)
    operands = [t[rows] for t in inputs.operands[:count]] + inputs.operands[count:]
    dres = None if inputs.dres is None else inputs.dres[rows]
    return Inputs(operands, [dy[rows] for dy in inputs.dys], dres)


def wrong(name: str, found: Tensor, exact: Tensor, plain: Tensor, where: str) -> Iterator[str]:
    error, chain = (distance(t, exact) for t in (found, plain))
    # The chain's sum is one of rounded parts, so it says nothing of what rounding the whole costs.
    most = torch.finfo(BF16).eps if is_sum(name) else FACTOR * chain
    if not error <= most:
        yield f"{where}{name} is {error:.3e} from fp64, allowed are {most:.3e}"


def distance(found: Tensor, exact: Tensor) -> float:
    """Of the row that is farthest off, its relative RMS error."""
    found, exact = (t.double().reshape(-1, t.shape[-1]) for t in (found, exact))
    scale = exact.square().mean(-1).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return ((found - exact).square().mean(-1).sqrt() / scale).max().item()


def check(large: Large, device: str, dry: bool) -> list[str]:
    """What is wrong with a case."""
    return list(failures_of(large, device, 1 << (12 if dry else 25)))
