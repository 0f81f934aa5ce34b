"""Which of a plan's fallbacks is launched, after a look at what the compiler made of them.

Private interfaces of Triton live here; the same in 3.6, 3.8 and 3.9.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from fxfuse.kernels.choice import Architecture, Device, Plan, occupancy


@dataclass(frozen=True)
class Resources:
    """What the compiler took: registers of a thread, bytes of spilled ones, bytes of shared memory
    of a program."""

    registers: int
    spills: int
    shared: int


# Bytes of spilled registers that are few.
_FEW = 64
# Worse than any that spills; launched only where nothing else is left, and then it says why.
_DOES_NOT_FIT = Resources(registers=255, spills=1 << 30, shared=0)

_settled: dict[tuple, Plan] = {}
_forced: dict[str, int] = {}


def settle(
    plan: Plan, arguments: Sequence[object], constants: Mapping[str, object], device: Device
) -> Plan:
    """The plan to launch: the first whose kernel spills no registers, or else spills the fewest.

    arguments: of the launch, with a dtype for a tensor that is not there yet.
    """
    if _forced:
        return _with_forced(plan)
    if not isinstance(plan.kernel, triton.JITFunction):
        return plan  # interpreted
    key = (plan, arguments[0].device, *map(_kind, arguments), *constants.values())
    if key not in _settled:
        with torch.cuda.device_of(arguments[0]):
            _settled[key], _ = choose(
                plan, lambda rung: _resources(rung, arguments, constants), device.architecture
            )
    return _settled[key]


def choose(
    plan: Plan, resources: Callable[[Plan], Resources], architecture: Architecture
) -> tuple[Plan, Resources]:
    """The first plan that spills nothing, or else the least; with its true number of residents."""
    taken: list[tuple[int, Plan, Resources]] = []
    for rung in rungs(plan):
        if rung.worse and min((spills for spills, *_ in taken), default=_FEW + 1) <= _FEW:
            break
        used = resources(rung)
        taken.append((used.spills, rung, used))
        if used.spills == 0:
            break
    _, best, used = min(taken, key=lambda entry: entry[0])
    if best.resident and architecture.lanes == 32:
        resident = occupancy(used.registers, used.shared, best.num_warps, architecture)
        best = replace(best, resident=resident)
    return best, used


@contextlib.contextmanager
def forced(
    num_warps: int | None = None,
    stages: int | None = None,
    resident: int | None = None,
    rung: int | None = None,
) -> Iterator[None]:
    """In this context every launch takes these, for measurements: warps, stages of a loop,
    programs of a multiprocessor, and which of the fallbacks (0: the plan itself)."""
    given = {"num_warps": num_warps, "stages": stages, "resident": resident, "rung": rung}
    before = dict(_forced)
    _forced.update({name: value for name, value in given.items() if value is not None})
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def rungs(plan: Plan) -> list[Plan]:
    """The plan and all its fallbacks."""
    found = [plan]
    while found[-1].fallback is not None:
        found.append(found[-1].fallback)
    return found


def _with_forced(plan: Plan) -> Plan:
    plan = rungs(plan)[: _forced.get("rung", 0) + 1][-1]
    constants = dict(plan.constants)
    if "STAGES" in constants and "stages" in _forced:
        constants["STAGES"] = _forced["stages"]
    return replace(
        plan,
        constants=constants,
        num_warps=_forced.get("num_warps", plan.num_warps),
        resident=_forced.get("resident", plan.resident),
    )


def _kind(value: object) -> object:
    """What of an argument decides about the kernel that is compiled."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    return value if value is None or isinstance(value, torch.dtype) else type(value)


def _resources(
    plan: Plan, arguments: Sequence[object], constants: Mapping[str, object]
) -> Resources:
    """Compile a plan's kernel for the current device, and look."""
    try:
        compiled = plan.kernel.warmup(
            *arguments, grid=(1,), **plan.constants, **constants, **plan.options
        )
        compiled._init_handles()
    except (OutOfResources, PTXASError):
        return _DOES_NOT_FIT
    return Resources(compiled.n_regs, 4 * compiled.n_spills, compiled.metadata.shared)
