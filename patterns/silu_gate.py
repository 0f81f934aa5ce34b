"""A silu gate on its own: x * silu(gate)."""

from __future__ import annotations

import torch

import fxfuse.kernels.ops  # noqa: F401  (defines the op)
from fxfuse.match import Bound, Call, Decline, upcast, var
from fxfuse.patterns.gates import gate_problem, gating, silu_gate_of
from fxfuse.patterns.near_gates import rounded_silu
from fxfuse.registry import pattern

x = upcast(var("x"), "x_cast", or_not=True)


@pattern("silu_gate", silu_gate_of(x), size=1, near_miss=rounded_silu)
def build(b: Bound) -> Call | Decline | None:
    """The product of two tensors of one shape, one of them under a silu."""
    problem = gate_problem(b, "x")
    if problem:
        return b.decline(problem)
    attributes = gating(b, "x", {b.x: "input", b.gate: "gate"})
    if not isinstance(attributes, dict):
        return attributes
    return b.call(torch.ops.fxfuse.silu_gate.default, b.x, b.gate, outputs=("gated",), **attributes)
