"""RMSNorm and then a silu gate: rms_norm(x) * silu(gate)."""

from __future__ import annotations

import torch

import fxfuse.kernels.ops  # noqa: F401  (defines the op)
from fxfuse.match import Bound, Call, Decline, known_equal, upcast, var
from fxfuse.patterns.gates import gate_problem, gating, silu_gate_of
from fxfuse.patterns.near_gates import other_gate
from fxfuse.patterns.norms import UNKNOWN, Norm, numerics, rms_norm_of
from fxfuse.registry import pattern

normed = upcast(rms_norm_of(var("x"), views=True), "normed_cast")


@pattern("rms_norm_silu_gate", silu_gate_of(normed), size=3, near_miss=other_gate)
def build(b: Bound) -> Call | Decline | None:
    """RMSNorm over the last dimension, times a gate of the same shape."""
    problem = _reshaped(b) or gate_problem(b, "normed")
    if problem:
        return b.decline(problem)
    norm = Norm(b, of="x")
    first = numerics(norm)
    if not isinstance(first, dict):
        return first
    if b.has("normed_cast") and b.facts.value(b.x) is None:
        return b.decline(UNKNOWN)
    second = gating(b, "normed", {b.x: "input", b.gate: "gate"})
    if not isinstance(second, dict):
        return second
    first["norm_dtype"] = first.pop("out_dtype")
    return b.call(
        torch.ops.fxfuse.rms_norm_silu_gate.default,
        b.x,
        b.gate,
        norm.vector,
        outputs=("gated",),
        **first,
        **second,
    )


def _reshaped(b: Bound) -> str | None:
    if all(b.view.term(n).word != "view" for n in b.nodes):
        return None
    x, normed = b.shape("x"), b.shape("normed")
    if x and normed and not known_equal(x[-1], normed[-1]):
        return (
            f"it gates after a norm over groups of {x[-1]} of {normed[-1]} columns: such a norm is "
            "fused only with a gate before it"
        )
    return "the norm is given another shape before it is gated"
