"""How a kernel is cut and launched, from its width and dtype and from what a GPU is like.

Never from the number of rows M: a row's result does not depend on the rows beside it, and a kernel
is compiled once for a width, dtypes and flags. What decides is that enough bytes are on their way
from memory at all times (bandwidth times latency), and that registers and shared memory suffice.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

MAX_TILE_ROWS = 128
# Up to this many columns a tile has several rows: this many bytes of each tensor.
_NARROW_COLUMNS = 512
NARROW_TILE_BYTES = 4096
# Elements of a tensor that one thread holds.
_THREAD_ELEMENTS = 16
# What the loops are planned for, until the compiler has said: registers of a thread.
_THREAD_REGISTERS = 128
# Shared memory beside the buffers of a loop: for reductions, and what the driver keeps.
_RESERVED = 2048
_MOST_STAGES = 6
_MOST_RESIDENT = 8

# ------------------------------------------------------------ what GPUs are like


@dataclass(frozen=True)
class Architecture:
    """What a launch needs to know of a kind of GPU; all figures are of one multiprocessor.

    in_flight: bytes of loads that must be under way to use the memory's bandwidth: 1.5 times the
    bandwidth's share, by published figures, times a latency of 0.9 microseconds.
    shared: bytes of shared memory that one program may use. shared_in_all: that all may use.
    lanes: threads of a warp. stages: the fewest buffers, plus one, with which a loop loads ahead.
    clusters: whether several programs may share one very wide row.
    """

    name: str
    in_flight: int
    shared: int
    shared_in_all: int
    threads: int = 2048
    registers: int = 65536
    lanes: int = 32
    stages: int = 3
    clusters: bool = False


KIB = 1024
NVIDIA = {
    80: Architecture("sm_80", 22 * KIB, 163 * KIB, 164 * KIB),
    86: Architecture("sm_86", 14 * KIB, 99 * KIB, 100 * KIB, threads=1536),
    90: Architecture("sm_90", 45 * KIB, 227 * KIB, 228 * KIB),
    100: Architecture("sm_100", 65 * KIB, 227 * KIB, 228 * KIB),
    103: Architecture("sm_103", 96 * KIB, 227 * KIB, 228 * KIB),
    120: Architecture("sm_120", 16 * KIB, 99 * KIB, 100 * KIB, threads=1536),
}
# Loops on AMD load ahead into registers, with two stages and no shared memory.
GFX942 = Architecture("gfx942", 20 * KIB, 64 * KIB, 64 * KIB, lanes=64, stages=2)
DEFAULT = NVIDIA[90]


def architecture(capability: int) -> Architecture:
    """Of an NVIDIA GPU with this compute capability (80, 90, ...): the nearest older one known."""
    known = [number for number in NVIDIA if number <= capability]
    return NVIDIA[max(known)] if known else NVIDIA[min(NVIDIA)]


@dataclass(frozen=True)
class Device:
    """A device: its architecture, and how many multiprocessors the backward may use."""

    architecture: Architecture
    multiprocessors: int


# Where Triton's interpreter runs.
_CPU = Device(DEFAULT, 2)


def device_of(tensor: torch.Tensor) -> Device:
    """The device that a kernel on `tensor` runs on."""
    return _device(tensor.device, _margin())


@functools.cache
def _device(device: torch.device, margin: int) -> Device:
    if device.type != "cuda":
        return replace(_CPU, multiprocessors=max(1, _CPU.multiprocessors - margin))
    found = torch.cuda.get_device_properties(device)
    kind = GFX942 if torch.version.hip else architecture(10 * found.major + found.minor)
    shared = getattr(found, "shared_memory_per_block_optin", 0) or found.shared_memory_per_block
    kind = replace(kind, shared=min(kind.shared, shared), clusters=clusters_work(kind))
    return Device(kind, max(1, found.multi_processor_count - margin))


def clusters_work(kind: Architecture) -> bool:
    """Whether clusters are asked for (FXFUSE_CLUSTERS=1: no GPU has tried them yet), and can be."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    able = kind.name in ("sm_90", "sm_100", "sm_103") and version >= (3, 9)
    return able and os.environ.get("FXFUSE_CLUSTERS") == "1"


def _margin() -> int:
    """Multiprocessors that the backward kernels leave to others, to communication for example."""
    text = os.environ.get("FXFUSE_SM_MARGIN", "").strip() or "0"
    if not text.isdecimal():
        raise ValueError(f"FXFUSE_SM_MARGIN is {text!r}: give a number of multiprocessors")
    return int(text)


# ------------------------------------------------------------ plans


@dataclass(frozen=True, eq=False)
class Plan:
    """A kernel, how rows are cut for it, and what it is compiled with.

    constants: compile-time constants. resident: programs of one multiprocessor, as far as known
    without compiling. registers: the most that a thread may use, None for what the compiler likes.
    clusters: programs that share the work of one, with one another's shared memory. fallback: the
    plan to take where this one's kernel spills registers. worse: whether a few spilled registers of
    the plans before it would cost less than this one does.
    """

    kernel: Any
    constants: dict[str, int]
    num_warps: int
    resident: int = 0
    registers: int | None = None
    clusters: int = 1
    worse: bool = False
    fallback: Plan | None = None

    @property
    def options(self) -> dict[str, object]:
        """Options of the compiler."""
        # the default of the first differs between Triton's versions, and with it the bits
        options: dict[str, object] = {"enable_fp_fusion": True, "num_warps": self.num_warps}
        if self.registers is not None:
            options["maxnreg"] = self.registers
        if self.clusters > 1:
            options["num_ctas"] = self.clusters
        return options


def looped(
    kernel: Any,
    constants: dict[str, int],
    num_warps: int,
    turn_bytes: int,
    architecture: Architecture,
    registers: int | None = None,
) -> Plan:
    """The plan of a kernel that loads ahead in a loop: its STAGES and its resident programs.

    num_warps: of 32 threads. turn_bytes: what one turn of the loop loads, of all tensors.
    """
    warps = num_warps * 32 // architecture.lanes
    resident = count_resident(warps, architecture)
    stages = count_stages(turn_bytes, resident, architecture)
    if architecture.lanes == 32:
        buffers = (stages - 1) * turn_bytes + _RESERVED
        resident = max(1, min(resident, architecture.shared_in_all // buffers))
    return Plan(
        kernel,
        constants | {"STAGES": stages},
        warps,
        resident,
        registers if architecture.lanes == 32 else None,
    )


def spread(plan: Plan, itemsize: int, architecture: Architecture) -> Iterator[Plan]:
    """The plan with twice the warps, where that leaves a thread 16 bytes of each tensor."""
    threads = 2 * plan.num_warps * architecture.lanes
    held = plan.constants["ROWS"] * plan.constants["BLOCK"] // threads * itemsize
    if threads <= 1024 and held >= 16:
        resident = max(1, plan.resident // 2)
        yield replace(plan, num_warps=2 * plan.num_warps, resident=resident)


def ladder(plans: Sequence[Plan]) -> Plan:
    """The first of the plans, with the next as its fallback, and so on."""
    first, *others = plans
    return replace(first, fallback=ladder(others)) if others else first


# ------------------------------------------------------------ sizes


def tile_of(
    columns: int,
    itemsize: int,
    widest: int,
    chunk: int,
    tile_bytes: int = NARROW_TILE_BYTES,
) -> tuple[int, int]:
    """Columns and rows of a tile: all columns up to `widest` of them, or else chunks of a row.

    tile_bytes: of each tensor in a tile of several rows.
    """
    block = triton.next_power_of_2(columns)
    if block > widest:
        block = chunk
    if block > _NARROW_COLUMNS:
        return block, 1
    return block, min(MAX_TILE_ROWS, tile_bytes // itemsize // block)


def count_warps(elements: int, thread_elements: int = _THREAD_ELEMENTS) -> int:
    """Warps of 32 threads for a tile of so many elements."""
    return min(32, max(4, elements // (32 * thread_elements)))


def count_resident(warps: int, architecture: Architecture) -> int:
    """Programs that a multiprocessor has registers for, as far as known without compiling."""
    registers = warps * architecture.lanes * _THREAD_REGISTERS
    return min(_MOST_RESIDENT, max(1, architecture.registers // registers))


def count_stages(tile_bytes: int, resident: int, architecture: Architecture) -> int:
    """Tiles that a loop holds, one of them in use, or 1 where there is no room to load ahead.

    tile_bytes: what one turn of the loop loads, of all tensors.
    """
    least = architecture.stages
    if architecture.lanes == 64:
        return least
    ahead = triton.cdiv(architecture.in_flight, resident * tile_bytes)
    wanted = min(_MOST_STAGES, max(least, 2 + ahead))
    room = min(architecture.shared, architecture.shared_in_all // resident) - _RESERVED
    stages = min(wanted, 1 + room // tile_bytes)
    if stages < least <= 1 + (architecture.shared - _RESERVED) // tile_bytes:
        stages = least  # with fewer programs on a multiprocessor
    return stages if stages >= least else 1


def occupancy(registers: int, shared: int, num_warps: int, architecture: Architecture) -> int:
    """Programs that run at once on a multiprocessor: registers of a thread, shared bytes of one."""
    threads = num_warps * architecture.lanes
    held = 8 * triton.cdiv(registers, 8) * threads
    fit = min(
        architecture.registers // held,
        architecture.shared_in_all // (shared + KIB),
        architecture.threads // threads,
    )
    return min(_MOST_RESIDENT, max(1, fit))
