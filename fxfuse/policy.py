"""Per site and side: the kernel, or plain PyTorch inline that a compiler fuses with its neighbours.

An opaque op is a barrier for a compiler, so a kernel has to win more than the fusions it prevents.
On a CPU rules decide, tried in order; on a GPU the cheaper of two costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fxfuse import costs, reasons
from fxfuse.costs import GPU, GPUS, Cost, Flow
from fxfuse.errors import BadOption

POLICIES = ("auto", "always", "never")
TARGETS = ("cpu", *GPUS)
# The costs are estimates: a lead of the kernel that is smaller than this is none.
TIE = 0.1


@dataclass(frozen=True)
class Place:
    """Where a site of a pattern will run.

    target: one of `TARGETS`. rows, columns, flow: None where they are not known. fp16: whether an
    operand or result is. trains: whether gradients are asked for. strided: whether the values of a
    row lie apart in memory. strided_vector: whether those of a weight do. added_apart: of a
    backward op that is there and is to take more gradients, how many of these Inductor would add up
    in one kernel; None for all else.
    """

    pattern: str
    target: str
    compiled: bool
    rows: int | None = None
    columns: int | None = None
    fp16: bool = False
    trains: bool = True
    strided: bool = False
    strided_vector: bool = False
    flow: Flow | None = None
    added_apart: int | None = None


@dataclass(frozen=True)
class Choice:
    """forward and backward: "kernel" or "inline"; why: one sentence for the report."""

    forward: str
    backward: str
    why: str


@dataclass(frozen=True)
class Rule:
    applies: Callable[[Place], bool]
    choice: Choice


NO_COMPILER = Choice("kernel", "kernel", "no compiler follows that would fuse it")
JOINED = Choice("kernel", "kernel", "it goes into a kernel that runs anyway")
ADDED = Choice("inline", "inline", "Inductor adds these gradients up where it computes them")
STRIDED = Choice("inline", "inline", "its rows lie apart in memory, and a kernel would copy them")
UNKNOWN = Choice("inline", "inline", "its shapes are not known, so nothing is put in the way")

# ---- CPU ----------------------------------------------------------------------------------------

CPU_RULES = (
    # Seen in 2.13: the backward of a norm keeps one row in a buffer while it walks several.
    Rule(
        lambda p: p.strided_vector,
        Choice("kernel", "kernel", "on a CPU Inductor mixes up rows where a weight is strided"),
    ),
    Rule(
        lambda p: p.fp16,
        Choice("kernel", "inline", "on a CPU Inductor would drop the forward's roundings to fp16"),
    ),
    Rule(
        lambda p: True,
        Choice("inline", "inline", "on a CPU Inductor vectorises both sides"),
    ),
)

# ---- GPU ----------------------------------------------------------------------------------------


def _by_cost(place: Place) -> Choice:
    if place.flow is None:
        return UNKNOWN
    if place.strided:
        return STRIDED
    gpu = GPUS[place.target]
    backward = costs.backward(place.flow, place.rows, place.columns, gpu)
    if place.flow.in_backward:
        side, why = _cheaper(place, *backward)
        return Choice(side, side, why)
    forward, why = _cheaper(place, *costs.forward(place.flow, place.columns))
    if not place.trains:
        return Choice(forward, forward, f"{why}; no gradient is asked for")
    side, reason = _cheaper(place, *backward)
    return Choice(forward, side, f"forward {why}; backward {reason}")


def _cheaper(place: Place, kernel: Cost, forms: list[Cost]) -> tuple[str, str]:
    """The side of the smaller cost, and the figures; forms: all that Inductor's code may be."""
    known = None not in (place.rows, place.columns)
    elements = place.rows * place.columns if known else None
    gpu = GPUS[place.target]
    wins = _leads(kernel, forms, gpu, elements)
    why = reasons.figures(kernel, forms)
    why += reasons.beyond_bytes(wins, _leads(kernel, forms, gpu, None), known)
    return ("kernel" if wins else "inline"), why


def _leads(kernel: Cost, forms: list[Cost], gpu: GPU, elements: int | None) -> bool:
    """Whether no form of Inductor's code is cheaper than the kernel, and one clearly dearer.

    A share of the bandwidth is the least certain figure: it is not set against more bytes.
    """
    ours, theirs = kernel.time(gpu, elements), [form.time(gpu, elements) for form in forms]
    more = kernel.moved > min(form.moved for form in forms)
    return not more and ours <= min(theirs) and ours < (1 - TIE) * max(theirs)


# ---- what decides -------------------------------------------------------------------------------


def choose(policy: str, place: Place) -> Choice | None:
    """The sides of a site, or None if policy leaves all sites alone."""
    if policy == "never":
        return None
    if place.added_apart is not None:
        by_compiler = policy == "auto" and place.compiled and place.added_apart > 1
        return ADDED if by_compiler else JOINED
    if policy == "always":
        return Choice("kernel", "kernel", "policy is always")
    if not place.compiled:
        return NO_COMPILER
    if place.target == "cpu":
        return next(rule.choice for rule in CPU_RULES if rule.applies(place))
    return _by_cost(place)


def check(policy: str) -> str:
    if policy not in POLICIES:
        raise BadOption(option="policy", value=policy, expected=f"use one of {', '.join(POLICIES)}")
    return policy


def check_target(target: str | None) -> str | None:
    if target is not None and target not in TARGETS:
        raise BadOption(option="target", value=target, expected=f"use one of {', '.join(TARGETS)}")
    return target
