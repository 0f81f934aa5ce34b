"""A residual add and the RMSNorm of its sum: h = x + residual; y = rms_norm(h)."""

from __future__ import annotations

import torch

import fxfuse.kernels.ops  # noqa: F401  (defines the op)
from fxfuse.match import Bound, Call, Decline, named, same_shape, var
from fxfuse.patterns.norms import Norm, numerics, rms_norm_of
from fxfuse.registry import pattern

total = named("h", var("x") + var("residual"))


@pattern("add_rms_norm", rms_norm_of(total), keep=("h",), size=2)
def build(b: Bound) -> Call | Decline | None:
    """Residual add and RMSNorm over the last dimension; the sum stays available."""
    x, residual = b.shape("x"), b.shape("residual")
    if x is not None and residual is not None and not same_shape(x, residual):
        return b.decline(f"the operands of the add broadcast: {tuple(x)} and {tuple(residual)}")
    if not (b.facts.is_tensor(b.x) and b.facts.is_tensor(b.residual)):
        return b.decline("one operand of the add is a number, not a residual stream")
    dtypes = [b.dtype(name) for name in ("x", "residual", "h")]
    if None not in dtypes and torch.promote_types(*dtypes[:2]) != dtypes[2]:
        return b.decline(f"the add returns {dtypes[2]}, which is not what promotion gives")
    norm = Norm(b)
    attributes = numerics(norm)
    if not isinstance(attributes, dict):
        return attributes
    return b.call(
        torch.ops.fxfuse.add_rms_norm.default,
        b.x,
        b.residual,
        norm.weight,
        outputs=("y", "h"),
        **attributes,
    )
