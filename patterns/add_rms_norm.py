"""A residual add and the RMSNorm of its sum: h = x + residual; y = rms_norm(h)."""

from __future__ import annotations

import torch

import fxfuse.kernels.ops  # noqa: F401  (defines the op)
from fxfuse.match import (
    Bound,
    Call,
    Decline,
    Viewed,
    known_equal,
    maybe_cast,
    named,
    reshaped,
    same_shape,
    upcast,
    var,
)
from fxfuse.patterns.near_norms import near_sum
from fxfuse.patterns.norms import Norm, numerics, rms_norm_of, saved_rstd
from fxfuse.patterns.residual import residual_problem
from fxfuse.registry import pattern

# Two halves are often added up in fp32 and rounded at once, which is what their plain sum does.
total = named(
    "h",
    maybe_cast(
        upcast(var("x"), "x_cast", or_not=True)
        + upcast(var("residual"), "residual_cast", or_not=True),
        "sum_cast",
    ),
)
# The sum, or a view of it.
rows = named("rows", reshaped(total))


@pattern("add_rms_norm", rms_norm_of(rows), keep=("h",), size=2, near_miss=near_sum)
def build(b: Bound) -> Call | Decline | None:
    """Residual add and RMSNorm over the last dimension; the sum stays available."""
    if b.facts.value(b.h) is None and any(map(b.has, ("x_cast", "residual_cast", "sum_cast"))):
        return None  # what is added in which dtype is not known
    if _rows_are_other_rows(b):
        return None
    problem = add_problem(b, "x", "residual") or residual_problem(b, "x", "residual")
    if problem:
        return b.decline(problem)
    if b.has("sum_cast") and b.is_read_outside(b.view.term(b.sum_cast).args[0]):
        return b.decline("the sum is read before it is cast, too: it stays outside")
    norm = Norm(b, of="rows")
    attributes = numerics(norm, rounds_rstd=True)
    if not isinstance(attributes, dict):
        return attributes
    ops, operands = torch.ops.fxfuse, (b.x, b.residual, norm.vector)
    y = _viewed_as_rows(b, attributes)
    rstd = saved_rstd(norm, attributes)
    if y is None or (rstd and y != "y"):
        return None
    if rstd:
        op = ops.add_rms_norm_fwd.default
        return b.call(op, *operands, outputs=("y", "h", rstd), **attributes)
    return b.call(
        ops.add_rms_norm.default, *operands, outputs=(y, "h"), saves=(norm.weight,), **attributes
    )


def _rows_are_other_rows(b: Bound) -> bool:
    """Whether the sum is viewed with another last dimension before it is normed."""
    if b.rows is b.h:
        return False
    shapes = b.shape("h"), b.shape("rows")
    return None in shapes or not all(shapes) or not known_equal(shapes[0][-1], shapes[1][-1])


def _viewed_as_rows(b: Bound, attributes: dict) -> str | Viewed | None:
    """The result y of the op in the shape that the graph has it in; None if there is none."""
    if b.rows is b.h:
        return "y"
    sizes = [size if isinstance(size, int) else -1 for size in b.shape("rows")]
    if sizes.count(-1) > 1:
        return None
    dtype = getattr(torch, attributes["out_dtype"])
    value = b.facts.value(b.h).new_empty(b.shape("h"), dtype=dtype)
    return Viewed("y", torch.ops.aten.reshape.default, (sizes,), value)


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
