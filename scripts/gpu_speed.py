"""Bandwidth of the ops: beside a plain copy of as many reads and writes, and torch.compile."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from op_cases import BF16, Case
from torch import Tensor

ELEMENTS = 1 << 26
DRY_ROWS, DRY_COLUMNS = 64, 128
MOST_GRADIENTS = 3
Call = Callable[[], object]
Row = dict[str, object]


class Operands:
    """Leaves and gradients of a case at the size that is timed, in bf16; M N is `ELEMENTS`."""

    def __init__(self, case: Case, N: int, device: str, dry: bool) -> None:
        M = DRY_ROWS if dry else ELEMENTS // N
        self.M, self.N = M, N
        shapes = [(M, N)] * len(case.rows) + [(N,)] * len(case.weights)
        make = functools.partial(torch.randn, dtype=BF16, device=device)
        self.leaves = [make(*shape, requires_grad=True) for shape in shapes]
        self.dys = [make(M, N) for _ in range(MOST_GRADIENTS)]
        self.dres = make(M, N)


def calls(compute: Callable, operands: Operands) -> tuple[Call, Call]:
    """The forward, and the backward with one gradient for each result, autograd included."""
    outputs = compute(*operands.leaves)
    gradients = [operands.dys[0], operands.dres][: len(outputs)]

    def backward() -> object:
        return torch.autograd.grad(outputs, operands.leaves, gradients, retain_graph=True)

    return lambda: compute(*operands.leaves), backward


def compiled(case: Case, dry: bool) -> Callable:
    """The chain under torch.compile, with the results of the op: y, and h if the op returns it."""

    def chain(*operands: Tensor) -> tuple[Tensor, ...]:
        return case.chain(*operands)[: case.results]

    return torch.compile(chain, backend="aot_eager" if dry else "inductor", dynamic=False)


def widths(case: Case, dry: bool) -> tuple[int, ...]:
    return (DRY_COLUMNS,) if dry and case.timed else case.timed


def prepare(case: Case, device: str, dry: bool) -> None:
    """Fill the caches of Triton and Inductor with what `measure` runs."""
    for N in widths(case, dry):
        for _, one in to_time(case, Operands(case, N, device, dry), dry):
            one()


def to_time(case: Case, operands: Operands, dry: bool) -> list[tuple[str, Call]]:
    """What is timed, by name."""
    torch.compiler.reset()
    # The backward runs again and again, so it may not write into what was saved for it.
    with torch._functorch.config.patch(donated_buffer=False):
        theirs = calls(compiled(case, dry), operands)
        theirs[1]()
    ours = calls(case.op, operands)
    inner = case.backward(*(t.detach() for t in operands.leaves))
    dres = operands.dres if case.residual else None
    return [
        ("ours forward", ours[0]), ("ours backward", ours[1]),
        ("theirs forward", theirs[0]), ("theirs backward", theirs[1]),
        ("inner", lambda: inner(operands.dys, dres)),
    ]  # fmt: skip


def measure(case: Case, N: int, device: str, dry: bool) -> Row:
    """One row of the table: GB/s by the fewest bytes that must move, and shares of them."""
    operands = Operands(case, N, device, dry)
    ms = {name: milliseconds(call, device) for name, call in to_time(case, operands, dry)}
    row: Row = {"op": case.name, "rows": operands.M, "columns": N}
    for i, side in enumerate(("forward", "backward")):
        mix = case.reads[i], case.writes[i]
        ours, theirs = (rate(sum(mix), operands, ms[f"{who} {side}"]) for who in ("ours", "theirs"))
        row[f"{side}, GB/s"] = ours
        row[f"{side}: of a copy"] = f"{ours / copy_rate(*mix, device, dry):.0%}"
        row[f"{side}: of torch.compile"] = f"{ours / theirs:.2f} x"
    mix = case.reads[1] + MOST_GRADIENTS - 1 + (case.residual and case.results == 1), case.writes[1]
    ours = rate(sum(mix), operands, ms["inner"])
    row["3 gradients, GB/s"] = ours
    row["3 gradients: of a copy"] = f"{ours / copy_rate(*mix, device, dry):.0%}"
    return row


def rate(tensors: int, operands: Operands, ms: float) -> float:
    """GB/s of moving so many tensors [M, N] in bf16."""
    return tensors * operands.M * operands.N * BF16.itemsize / ms / 1e6


@functools.cache
def copy_rate(reads: int, writes: int, device: str, dry: bool) -> float:
    """GB/s of a kernel that does nothing but read and write so many tensors."""
    size = 1 << 14 if dry else ELEMENTS
    source = torch.ones(reads, size, dtype=BF16, device=device)
    target = torch.empty(writes, size, dtype=BF16, device=device)
    ms = milliseconds(lambda: copy(source, target), device)
    return (reads + writes) * size * BF16.itemsize / ms / 1e6


def copy(source: Tensor, target: Tensor) -> None:
    """Each of `target` [writes, size] becomes the sum of `source` [reads, size]."""
    if source.device.type == "cpu":
        target.copy_(source.sum(0))
        return
    from gpu_copy import copy_kernel

    block, size = 4096, source.shape[1]
    grid = (size // block,)
    copy_kernel[grid](source, target, size, len(source), len(target), BLOCK=block, num_warps=8)


def milliseconds(call: Call, device: str) -> float:
    """The median time of a call."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    from triton.testing import do_bench

    return do_bench(call, warmup=10, rep=50, return_mode="median")
