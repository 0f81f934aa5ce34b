"""A norm, a residual add and a norm of the sum: h = residual + rms_norm(x); y = rms_norm(h)."""

from __future__ import annotations

import torch
from torch import fx

import fxfuse.kernels.ops  # noqa: F401  (defines the op)
from fxfuse.match import Bound, Call, Decline, behind_casts, named, same_shape, upcast, var
from fxfuse.patterns.add_rms_norm import add_problem
from fxfuse.patterns.near_norms import post_norm
from fxfuse.patterns.norms import UNKNOWN, Norm, numerics, rms_norm_of
from fxfuse.patterns.residual import residual_problem
from fxfuse.registry import pattern

first = upcast(rms_norm_of(var("x"), prefix="first_"), "first_normed_cast")
total = named("h", first + var("residual"))


@pattern("rms_norm_add_rms_norm", rms_norm_of(total), keep=("h",), size=4, near_miss=post_norm)
def build(b: Bound) -> Call | Decline | None:
    """Two RMSNorms over the last dimension around a residual add; the sum stays available."""
    if _is_sum(b, b.x):
        return None  # then add_rms_norm twice takes both adds
    problem = add_problem(b, "first_normed", "residual")
    problem = problem or residual_problem(b, "x", "residual")
    if problem:
        return b.decline(problem)
    if b.has("first_normed_cast") and b.facts.value(b.h) is None:
        return b.decline(UNKNOWN)
    one, two = Norm(b, "first_", of="x"), Norm(b)
    numbers = [numerics(norm) for norm in (one, two)]
    for found in numbers:
        if not isinstance(found, dict):
            return found
    numbers[0]["norm_dtype"] = numbers[0].pop("out_dtype")
    out_dtype, contiguous = numbers[1].pop("out_dtype"), numbers[1].pop("contiguous")
    swapped = behind_casts(b.view, b.term("h").args[0]) is not behind_casts(b.view, b.residual)
    return b.call(
        torch.ops.fxfuse.rms_norm_add_rms_norm.default,
        b.x,
        b.residual,
        one.vector,
        two.vector,
        outputs=("y", "h"),
        out_dtype=out_dtype,
        contiguous=contiguous,
        swapped=swapped,
        **{f"{name}1": value for name, value in numbers[0].items()},
        **{f"{name}2": value for name, value in numbers[1].items()},
    )


def _is_sum(b: Bound, x: object) -> bool:
    """True for the sum of two tensors of one shape."""
    term = b.view.see(x)
    if term is None or term.word != "add" or not all(isinstance(a, fx.Node) for a in term.args):
        return False
    shapes = [b.facts.shape(operand) for operand in term.args]
    return None in shapes or same_shape(*shapes)
