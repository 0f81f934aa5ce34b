"""What the memory gives at best, by how many tensors are read and written: the denominators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import gpu_time
import torch
from op_cases import BF16, CASES
from torch import Tensor

SIZE, DRY_SIZE = 1 << 29, 1 << 14  # elements of a tensor: 1 GiB
MEASURED_MS = 50
# Elements and warps of a program; the ceiling is the fastest.
SHAPES = ((1024, 4), (2048, 4), (4096, 8))
# One tensor read and written, the reads alone, and what the notes of other kernels compare with.
COMMON = ((1, 1), (1, 0), (2, 0), (2, 1), (3, 1), (3, 2), (2, 2))
Mix = tuple[int, int]  # tensors read and written


def mixes() -> list[Mix]:
    """All that a kernel is compared with, the common ones first."""
    found = [mix for case in CASES.values() for mix in case.mixes()]
    return list(dict.fromkeys((*COMMON, *sorted(found))))


def rows(device: str) -> Iterator[dict[str, object]]:
    """The table, a row at a time."""
    for reads, writes in mixes():
        yield {"reads": reads, "writes": writes, "GB/s": ceiling((reads, writes), device)}


@functools.cache
def ceiling(mix: Mix, device: str) -> float:
    """GB/s of a kernel that does nothing but read and write so many tensors in bf16."""
    reads, writes = mix
    size = DRY_SIZE if device == "cpu" else SIZE
    source = torch.ones(reads, size, dtype=BF16, device=device)
    target = torch.empty(writes or 1, size, dtype=BF16, device=device)
    times = [time_of(call, device) for call in copies(source, target, writes)]
    return (reads + writes) * size * BF16.itemsize / min(times) / 1e6


def time_of(call: Callable[[], object], device: str) -> float:
    if device == "cpu":
        return gpu_time.measure([call], device).ms
    return gpu_time.flushed(call, MEASURED_MS)


def copies(source: Tensor, target: Tensor, writes: int) -> list[Callable[[], object]]:
    """Ways to make each of `target` [writes, size] the sum of `source` [reads, size]."""
    if source.device.type == "cpu":
        return [lambda: target.copy_(source.sum(0))]
    from gpu_copy import copy_kernel

    def copy(block: int, warps: int) -> None:
        size = source.shape[1]
        grid = (size // block,)
        copy_kernel[grid](source, target, size, len(source), writes, BLOCK=block, num_warps=warps)

    return [functools.partial(copy, *shape) for shape in SHAPES]


def prepare(device: str) -> None:
    """Fill Triton's cache with the kernels that `ceiling` runs, on small tensors."""
    for reads, writes in mixes():
        source = torch.ones(reads, DRY_SIZE, dtype=BF16, device=device)
        target = torch.empty(writes or 1, DRY_SIZE, dtype=BF16, device=device)
        for call in copies(source, target, writes):
            call()
