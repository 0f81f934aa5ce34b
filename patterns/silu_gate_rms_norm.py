"""A silu gate and then RMSNorm, over all columns or groups of them: rms_norm(x * silu(gate))."""

from __future__ import annotations

import torch
from torch import fx

import fxfuse.kernels.ops  # noqa: F401  (defines the op)
from fxfuse.match import Bound, Call, Decline, known_equal, named, reshaped, same_shape, upcast, var
from fxfuse.patterns.gates import gate_problem, gating, silu_gate_of
from fxfuse.patterns.norms import Norm, numerics, rms_norm_of
from fxfuse.registry import pattern

x = upcast(var("x"), "x_cast", or_not=True)
grouped = named("h", reshaped(silu_gate_of(x)))


@pattern("silu_gate_rms_norm", rms_norm_of(grouped, views=True), size=3)
def build(b: Bound) -> Call | Decline | None:
    """RMSNorm of gated rows, or of equal groups of their columns, in the shape of x."""
    problem = gate_problem(b, "x")
    if problem:
        return b.decline(problem)
    group = _group(b)
    if not isinstance(group, int):
        return group
    first = gating(b, "x", {b.x: "input", b.gate: "gate"})
    if not isinstance(first, dict):
        return first
    first["gated_dtype"] = first.pop("out_dtype")
    columns = b.shape("x")[-1] if group else None
    own = first["gated_dtype"]  # of the two dtypes that "" may promote to, none has a name
    norm = Norm(b, columns=columns, own=own or None, dtypes={b.x: "input", b.gate: "gate"})
    second = numerics(norm)
    if not isinstance(second, dict):
        return second
    second["contiguous"] |= group > 0 and not same_shape(b.shape("h")[:-2], b.shape("x")[:-1])
    return b.call(
        torch.ops.fxfuse.silu_gate_rms_norm.default,
        b.x,
        b.gate,
        norm.vector,
        outputs=("normed",),
        group=group,
        **first,
        **second,
    )


def _group(b: Bound) -> int | Decline | None:
    """The columns that are normalised together, 0 for all of them."""
    if all(b.view.term(n).word != "view" for n in b.nodes):
        return 0
    x, h, normed = b.shape("x"), b.shape("h"), b.shape("normed")
    if None in (x, h, normed):
        return b.decline("the shapes of its views are not known: pass example_inputs")
    if not same_shape(x, normed):
        return None  # a view that has nothing to do with the groups
    columns, group = _known(x[-1]), _known(h[-1])
    if columns is None or group is None:
        return b.decline("the width of its rows or groups is symbolic: make only the rows dynamic")
    if group == 0 or columns % group:
        return b.decline(f"its groups of {group} columns do not divide a row of {columns}")
    if any(_computed(b, view) for view in b.nodes):
        return b.decline("its groups are computed by the graph")
    if _misplaced(b, columns, group):
        return b.decline(_MISPLACED)
    return group if b.view.term(_source(b)).word == "view" else 0


def _source(b: Bound) -> fx.Node:
    """What is normalised: the last of the views that make the groups, if there is one."""
    node = b.h
    while b.view.term(node).word == "same":
        node = b.view.term(node).args[0]
    return node


def _known(size: int | torch.SymInt) -> int | None:
    """A size that is a number by now, if only because the model has compared it with one."""
    return size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size


def _computed(b: Bound, node: fx.Node) -> bool:
    """True if the last size of a view was found on example inputs, and others may give another."""
    term = b.view.term(node)
    if term.word != "view":
        return False
    last, dynamo = term.args[1], "example_value" in node.meta
    if isinstance(last, fx.Node):
        value = last.meta.get("example_value", last.meta.get("val"))
        proven = isinstance(value, torch.SymInt) and _known(value) is not None
        same = [b.get(name) for name in ("x", "gate", "product_with_gate", "gated")]
        return not (proven or dynamo or _is_shape(last, same))
    guarded = dynamo or isinstance(node.target, torch._ops.OpOverload)
    return node is _source(b) and not guarded and last in (None, -1)


def _is_shape(node: fx.Node, tensors: list) -> bool:
    """True for `x.shape` and `x.size()`."""
    whole = node.args[1:] == (("shape",) if node.target is getattr else ())
    return whole and node.target in (getattr, "size") and node.args[0] in tensors


_MISPLACED = "its weight does not have one value for each column of all the groups"


def _misplaced(b: Bound, columns: int, group: int) -> bool:
    """True if the weight is not laid along all columns where it multiplies."""
    if not b.has("product"):
        return False
    scale, product = b.shape("scale"), b.shape("product")
    while scale and len(scale) > 1 and known_equal(scale[0], 1):
        scale = scale[1:]
    spread = (columns,) if len(scale or ()) == 1 else (columns // group, group)
    return (
        not scale
        or not product
        or not (same_shape(scale, spread) and same_shape(product[-len(spread) :], spread))
    )
