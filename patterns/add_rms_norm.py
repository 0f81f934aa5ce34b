"""A residual add and the RMSNorm of its sum: h = x + residual; y = rms_norm(h)."""

from __future__ import annotations

import torch

import fxfuse.kernels.ops  # noqa: F401  (defines the op)
from fxfuse.match import Bound, Call, Decline, named, same_shape, var
from fxfuse.patterns.norms import Norm, numerics, rms_norm_of, saved_rstd
from fxfuse.registry import pattern

total = named("h", var("x") + var("residual"))


@pattern("add_rms_norm", rms_norm_of(total), keep=("h",), size=2)
def build(b: Bound) -> Call | Decline | None:
    """Residual add and RMSNorm over the last dimension; the sum stays available."""
    problem = add_problem(b, "x", "residual")
    if problem:
        return b.decline(problem)
    norm = Norm(b)
    attributes = numerics(norm)
    if not isinstance(attributes, dict):
        return attributes
    ops, operands = torch.ops.fxfuse, (b.x, b.residual, norm.weight)
    rstd = saved_rstd(norm, attributes)
    if rstd:
        op = ops.add_rms_norm_fwd.default
        return b.call(op, *operands, outputs=("y", "h", rstd), **attributes)
    return b.call(
        ops.add_rms_norm.default, *operands, outputs=("y", "h"), saves=(norm.weight,), **attributes
    )


def add_problem(b: Bound, branch: str, residual: str) -> str | None:
    """Why h is not the plain sum of the tensors bound to two names, or None."""
    shapes = b.shape(branch), b.shape(residual)
    if None not in shapes and not same_shape(*shapes):
        return f"the operands of the add broadcast: {tuple(shapes[0])} and {tuple(shapes[1])}"
    if not (b.facts.is_tensor(b.get(branch)) and b.facts.is_tensor(b.get(residual))):
        return "one operand of the add is a number, not a residual stream"
    dtypes = [b.dtype(name) for name in (branch, residual, "h")]
    if None not in dtypes and torch.promote_types(*dtypes[:2]) != dtypes[2]:
        return f"the add returns {dtypes[2]}, which is not what promotion gives"
    return None
