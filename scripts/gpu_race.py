"""The backward kernels in every cut that may be fast, beside the one that is chosen."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import gpu_time
import torch
from gpu_ceilings import ceiling
from gpu_speed import ELEMENTS, Operands, Shape, ours
from op_cases import BF16, CASES
from triton.errors import TritonError

from fxfuse.kernels.settle import forced

NAMES = ("add_rms_norm", "rms_norm_silu_gate", "rms_norm_add_rms_norm")
WIDTHS = (4096, 8192, 2048, 1024, 16384)
# Two stages overlap nothing, see the kernels.
WARPS, STAGES, RESIDENT = (4, 8, 16, 32), (1, 3, 5), (1, 2, 4, 8)
THREAD_ELEMENTS = (4, 64)  # of a row, for one thread
# From so many columns on the plan has a fallback that walks chunks of a row; below, only itself.
TWO_RUNGS = 8192
MOST_WARPS = 64  # of a multiprocessor
MEASURED_MS = 20
# The results of two cuts may be apart by so much, by relative RMS: sums have another order.
APART = 1e-2
# A cut is worth an entry in the table if it is so much faster than the chosen one.
GAIN = 1.02
# Too little shared memory or too few registers, for the compiler or the driver; no such fallback.
DOES_NOT_FIT = (RuntimeError, TritonError, IndexError)


@dataclass(frozen=True)
class Cut:
    """num_warps: of a program; stages: of its loop; resident: programs on a multiprocessor.

    rung: which of the plan's fallbacks, 0 for the plan itself.
    """

    num_warps: int
    stages: int
    resident: int
    rung: int

    def __str__(self) -> str:
        text = f"{self.num_warps} warps, {self.stages} stages, {self.resident} resident"
        return text + f", fallback {self.rung}" * bool(self.rung)


@dataclass(frozen=True)
class Result:
    """The race at one width: milliseconds as chosen, and of each cut that ran, by speed.

    unfit: how many cuts did not run, for want of shared memory, registers or a fallback.
    """

    shape: Shape
    chosen: float
    cuts: list[tuple[float, Cut]]
    unfit: int

    @property
    def entry(self) -> Cut | None:
        """The fastest cut, where it is faster than the chosen one."""
        best, cut = self.cuts[0] if self.cuts else (self.chosen, None)
        return cut if cut and self.chosen > GAIN * best else None

    def as_json(self, device: str) -> dict[str, object]:
        """ceiling_ms: what moving the fewest bytes takes at best."""
        shape = self.shape
        least = shape.case.least_bytes(shape.M, shape.N, BF16.itemsize, 1)
        return {
            "op": shape.name,
            "columns": shape.N,
            "ceiling_ms": least / ceiling(shape.case.mix(1), device) / 1e6,
            "chosen_ms": self.chosen,
            "cuts": [{"ms": ms, **asdict(cut)} for ms, cut in self.cuts],
            "do not fit": self.unfit,
        }


def shown(row: dict) -> dict[str, object]:
    """A row for people: of all cuts only the fastest."""
    cuts, most = row["cuts"], row["ceiling_ms"]
    best = cuts[0] if cuts else None
    names = ("num_warps", "stages", "resident", "rung")
    return {
        "op": row["op"],
        "columns": row["columns"],
        "as chosen: of the ceiling": f"{most / row['chosen_ms']:.0%}",
        "fastest: of the ceiling": f"{most / best['ms']:.0%}" if best else None,
        "fastest": str(Cut(*(best[name] for name in names))) if best else None,
        "cuts": len(cuts),
        "do not fit": row["do not fit"],
    }


def shapes(dry: bool) -> list[Shape]:
    widths = (128,) if dry else WIDTHS
    return [Shape(name, 64 if dry else ELEMENTS // N, N) for N in widths for name in NAMES]


def cuts(N: int, dry: bool) -> list[Cut]:
    """Those that give a thread enough to do, and a multiprocessor not too much."""
    least, most = THREAD_ELEMENTS
    warps = [w for w in WARPS if least <= N / (32 * w) <= most] or WARPS[:1]
    found = [
        Cut(*cut)
        for cut in itertools.product(warps, STAGES, RESIDENT, (0, 1) if N >= TWO_RUNGS else (0,))
        if cut[0] * cut[2] <= MOST_WARPS
    ]
    return found[:: len(found) // 2] if dry else found


def run(shape: Shape, device: str, dry: bool) -> tuple[Result, list[str]]:
    """The race at one width, and which cuts gave another result."""
    operands = Operands(shape, device)
    call = ours(CASES[shape.name]).make(operands, 1)
    right = call()
    found, failures, unfit = [], [], 0
    for cut in cuts(shape.N, dry):
        with forced(**asdict(cut)):
            try:
                apart = distance(call(), right)
            except DOES_NOT_FIT:
                unfit += 1
                continue
            if not apart <= APART:
                failures.append(f"{shape}, {cut}: {apart:.1e} from the result as chosen")
            found.append((milliseconds(call, device), cut))
    found.sort(key=lambda one: one[0])
    return Result(shape, milliseconds(call, device), found, unfit), failures


def milliseconds(call: gpu_time.Call, device: str) -> float:
    if device == "cpu":
        return gpu_time.measure([call], device).ms
    return gpu_time.flushed(call, MEASURED_MS)


def distance(found: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> float:
    return max(
        ((one.float() - other.float()).norm() / other.float().norm()).item()
        for one, other in zip(found, right)
        if other is not None
    )


def table(results: list[Result]) -> Iterator[str]:
    """What is faster than what is chosen, as lines of an override table."""
    for result in results:
        if (cut := result.entry) is not None:
            key = (f"{result.shape.name}_bwd", result.shape.N, "bfloat16")
            yield f"{key}: {asdict(cut)},"


def prepare(shape: Shape, device: str, dry: bool) -> None:
    """Fill Triton's cache with the kernels that `run` compares: few rows are enough."""
    operands = Operands(Shape(shape.name, 64, shape.N), device)
    call = ours(CASES[shape.name]).make(operands, 1)
    call()
    for cut in {replace(cut, resident=1) for cut in cuts(shape.N, dry)}:
        with forced(**asdict(cut)), contextlib.suppress(*DOES_NOT_FIT):
            call()
