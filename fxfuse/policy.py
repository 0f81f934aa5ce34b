"""Per site and side: the kernel, or plain PyTorch inline that a compiler fuses with its neighbours.

An opaque op is a barrier for a compiler, so a kernel has to win more than the fusions it prevents.
The rules and their reasons are data, tried in order; the first that applies decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fxfuse.errors import BadOption

POLICIES = ("auto", "always", "never")
TARGETS = ("cpu", "sm_80", "sm_90", "sm_100")


@dataclass(frozen=True)
class Place:
    """Where a site of a pattern will run. rows and columns are None where they are not known.

    half: whether an operand or result is fp16 or bf16.
    """

    pattern: str
    device: str  # "cpu" or "gpu"
    compiled: bool
    rows: int | None
    columns: int | None
    half: bool


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


def _backward_folds(p: Place) -> bool:
    """Sizes at which Inductor makes one pass of the backward (torch 2.10 to 2.14, see design)."""
    known = p.rows is not None and p.columns is not None
    return (
        known and p.rows >= 4096 and p.rows >= 2 * p.columns
        and p.rows * p.columns >= 5 << 20 and p.columns <= 4096
    )  # fmt: skip


RULES = (
    Rule(
        lambda p: not p.compiled,
        Choice("kernel", "kernel", "no compiler follows that would fuse it"),
    ),
    Rule(
        lambda p: p.device == "cpu" and p.half,
        Choice("kernel", "inline", "on a CPU Inductor would drop the roundings of the forward"),
    ),
    Rule(
        lambda p: p.device == "cpu",
        Choice("inline", "inline", "on a CPU Inductor vectorises both sides"),
    ),
    Rule(
        lambda p: p.pattern == "silu_gate",
        Choice(
            "inline", "inline", "it is elementwise, so the compiler fuses it with its neighbours"
        ),
    ),
    Rule(
        lambda p: p.pattern == "rms_norm_add_rms_norm",
        Choice("kernel", "kernel", "Inductor makes a pass over the rows for each of the two norms"),
    ),
    Rule(
        lambda p: p.columns is not None and p.columns <= 1024 and _backward_folds(p),
        Choice("inline", "inline", "Inductor reads rows this narrow once in both directions"),
    ),
    Rule(
        lambda p: p.columns is not None and p.columns <= 1024,
        Choice(
            "inline", "kernel", "Inductor's forward reads a narrow row once, its backward does not"
        ),
    ),
    Rule(
        _backward_folds,
        Choice("kernel", "inline", "Inductor reads a row this wide twice forward, once backward"),
    ),
    Rule(
        lambda p: True,
        Choice("kernel", "kernel", "Inductor reads the rows twice in both directions"),
    ),
)


# Of a backward pattern: its op is a kernel already.
JOINED = Choice("kernel", "kernel", "it goes into a kernel that runs anyway")


def choose(policy: str, place: Place | None) -> Choice | None:
    """The sides of a site, or None if policy leaves all sites alone; no place: a backward op's."""
    if policy == "never":
        return None
    if place is None:
        return JOINED
    if policy == "always":
        return Choice("kernel", "kernel", "policy is always")
    return next(rule.choice for rule in RULES if rule.applies(place))


def check(policy: str) -> str:
    if policy not in POLICIES:
        raise BadOption(option="policy", value=policy, expected=f"use one of {', '.join(POLICIES)}")
    return policy


def check_target(target: str | None) -> str | None:
    if target is not None and target not in TARGETS:
        raise BadOption(option="target", value=target, expected=f"use one of {', '.join(TARGETS)}")
    return target


def place(
    pattern: str,
    values: Sequence[torch.Tensor | None],
    compiled: bool,
    target: str | None,
    group: int = 0,
) -> Place:
    """Where a site will run. values: its result, then all else that it reads or returns.

    A target overrides the device of the values. group: columns that are a row of their own.
    """
    known = [v for v in values if v is not None]
    kind = "cpu" if not known or known[0].device.type == "cpu" else "gpu"
    if target is not None:
        kind = "cpu" if target == "cpu" else "gpu"
    half = any(v.dtype in (torch.float16, torch.bfloat16) for v in known)
    if values[0] is None:
        return Place(pattern, kind, compiled, None, None, half)
    *sizes, columns = (*values[0].shape,) or (None,)
    rows: int | None = 1
    for size in sizes:
        rows = rows * size if isinstance(size, int) and rows is not None else None
    columns = columns if isinstance(columns, int) else None
    if group and columns is not None:
        rows = None if rows is None else rows * (columns // group)
        columns = group
    return Place(pattern, kind, compiled, rows, columns, half)
