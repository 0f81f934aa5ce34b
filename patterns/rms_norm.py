"""RMSNorm on its own: x / sqrt(mean(x^2) + eps) [* weight]."""

from __future__ import annotations

import torch

import fxfuse.kernels.ops  # noqa: F401  (defines the op)
from fxfuse.match import Bound, Call, Decline, Fork, var
from fxfuse.patterns.near_norms import near_miss
from fxfuse.patterns.norms import Norm, numerics, rms_norm_of, saved_rstd
from fxfuse.registry import pattern


@pattern("rms_norm", rms_norm_of(var("h")), size=1, near_miss=near_miss, any_dim=True)
def build(b: Bound) -> Call | Decline | None:
    """RMSNorm over the last dimension, or over another one."""
    norm = Norm(b)
    attributes = numerics(norm, rounds_rstd=True)
    if not isinstance(attributes, dict):
        return attributes
    ops, y = torch.ops.fxfuse, ("y",)
    dim = b.facts.dim
    if dim != -1:
        if norm.weight is None and b.facts.value(b.h).stride(dim) != 1:
            return b.decline(f"it is over dim {dim}, not the last, and has no weight along that")
        return b.call(ops.rms_norm.default, b.h, norm.weight, outputs=y, dim=dim, **attributes)
    rstd = saved_rstd(norm, attributes)
    if rstd:
        op = ops.rms_norm_fwd.default
        return b.call(op, b.h, norm.vector, outputs=("y", rstd), **attributes)
    fork = Fork(ops.rms_norm_fork.default, of="h", pattern="backward_add_rms_norm")
    return b.call(ops.rms_norm.default, b.h, norm.vector, outputs=y, fork=fork, **attributes)
