"""Per site and side: the kernel, or plain PyTorch inline that a compiler fuses with its neighbours.

An opaque op is a barrier for a compiler, so a kernel has to win more than the fusions it prevents.
The rules and their reasons are data, tried in order; the first that applies decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fxfuse.errors import BadOption

POLICIES = ("auto", "always", "never")
TARGETS = ("cpu", "sm_80", "sm_90", "sm_100")


@dataclass(frozen=True)
class Place:
    """Where a site will run. rows and columns are None where they are symbolic or not known."""

    device: str  # "cpu" or "gpu"
    compiled: bool
    rows: int | None
    columns: int | None
    half: bool = False


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


def choose(policy: str, place: Place) -> Choice | None:
    """The sides of a site, or None if policy leaves all sites alone."""
    if policy == "never":
        return None
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


def place(value: torch.Tensor | None, compiled: bool, target: str | None) -> Place:
    """Where a norm over the last dimension of `value` will run; a target overrides its device."""
    if target is not None:
        kind = "cpu" if target == "cpu" else "gpu"
    else:
        kind = "cpu" if value is None or value.device.type == "cpu" else "gpu"
    if value is None:
        return Place(kind, compiled, None, None)
    rows: int | None = 1
    for size in value.shape[:-1]:
        rows = rows * size if isinstance(size, int) and rows is not None else None
    columns = value.shape[-1] if value.dim() and isinstance(value.shape[-1], int) else None
    return Place(kind, compiled, rows, columns, value.dtype in (torch.float16, torch.bfloat16))
