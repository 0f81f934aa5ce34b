"""Times of the fused ops against plain PyTorch, side by side: scripts/benchmark.py [ROW ...]

Each row is a function that returns a `Row`. The two sides run in turn, so that a busy machine slows
both, and the medians are compared. Exits with 1 when a row misses its target.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import Tensor

import fxfuse.kernels.ops  # noqa: F401

EPS = 1e-6
ROUNDS, WARM_UP = 31, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Row:
    """The medians in milliseconds of what is measured and what it is measured against."""

    name: str
    ours: float
    baseline: float
    target: float

    @property
    def speedup(self) -> float:
        return self.baseline / self.ours


def add_norm_fp32() -> Row:
    return add_norm(torch.float32)


def add_norm_bf16() -> Row:
    return add_norm(torch.bfloat16)


def norm_fp32() -> Row:
    return norm(torch.float32)


def norm_bf16() -> Row:
    return norm(torch.bfloat16)


def add_norm(dtype: torch.dtype, M: int = 2048, N: int = 2048) -> Row:
    """Residual add + RMSNorm in an eager graph, forward and backward; the loss reads y and h."""
    inputs, (dy, dh) = operands((M, N), (M, N), (N,), dtype=dtype), gradients(2, M, N, dtype)

    def ours(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        op = torch.ops.fxfuse.add_rms_norm.default
        return op(x, residual, weight, eps=EPS, unit_dtype="input")

    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return llama_norm(h, weight), h

    sides = [step(side, inputs, (dy, dh)) for side in (ours, eager)]
    return Row(f"add + norm, {M} x {N}, {name(dtype)}", *compare(*sides), target=2.0)


def norm(dtype: torch.dtype, M: int = 2048, N: int = 2048) -> Row:
    """RMSNorm alone in an eager graph, forward and backward."""
    inputs, dys = operands((M, N), (N,), dtype=dtype), gradients(1, M, N, dtype)

    def ours(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (torch.ops.fxfuse.rms_norm.default(x, weight, eps=EPS, unit_dtype="input"),)

    def eager(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (llama_norm(x, weight),)

    sides = [step(side, inputs, dys) for side in (ours, eager)]
    return Row(f"norm, {M} x {N}, {name(dtype)}", *compare(*sides), target=2.0)


ROWS = {row.__name__: row for row in (add_norm_fp32, add_norm_bf16, norm_fp32, norm_bf16)}


def llama_norm(h: Tensor, weight: Tensor) -> Tensor:
    s = h.to(torch.float32)
    s = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * s.to(h.dtype)


def operands(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(s, dtype=dtype, device=DEVICE, requires_grad=True) for s in shapes]


def gradients(count: int, M: int, N: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(M, N, dtype=dtype, device=DEVICE) for _ in range(count)]


def step(function: Callable, inputs: list[Tensor], dys: tuple | list) -> Callable[[], object]:
    """One training step of `function`: its outputs, then the gradients of its inputs."""
    return lambda: torch.autograd.grad(function(*inputs), inputs, dys)


def compare(*sides: Callable[[], object]) -> list[float]:
    """The median of each side in milliseconds, measured in turn."""
    times = [[] for _ in sides]
    for round_ in range(WARM_UP + ROUNDS):
        for side, record in zip(sides, times):
            seconds = timed(side)
            if round_ >= WARM_UP:
                record.append(1e3 * seconds)
    return [statistics.median(record) for record in times]


def timed(side: Callable[[], object]) -> float:
    synchronize()
    begin = time.perf_counter()
    side()
    synchronize()
    return time.perf_counter() - begin


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(ROWS))
    if unknown:
        print(f"no row {', '.join(unknown)}: the rows are {', '.join(ROWS)}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    rows = [ROWS[n]() for n in names or ROWS]
    header = ("forward + backward", "fxfuse, ms", "eager, ms", "times faster", "target")
    lines = [(r.name, r.ours, r.baseline, r.speedup, r.target) for r in rows]
    print(f"{DEVICE}, {torch.get_num_threads()} threads, medians of {ROUNDS} alternating runs\n")
    print(tabulate(lines, header, floatfmt=("", ".2f", ".2f", ".2f", ".1f")))
    return int(any(r.speedup < r.target for r in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
