"""What looks like a norm and is none that the patterns know: one sentence for each."""

from __future__ import annotations

from torch import fx

from fxfuse.match import (
    Bound,
    Decline,
    Fusion,
    Term,
    View,
    named,
    same_shape,
    upcast,
    var,
)
from fxfuse.patterns.norms import Norm, rms_norm_of, weight_problem


def near_miss(view: View, node: fx.Node) -> str | None:
    """Why a whole norm, or the root of a mean of squares, is no RMSNorm; None for other nodes."""
    term = view.term(node)
    if term.word == "rms_norm":
        return term.flaw or "it is not in a form that the op computes"
    if term.word not in ("rsqrt", "sqrt"):
        return None
    below = _mean_square(view, term)
    if below is None:
        return None
    if below.flaw:
        return below.flaw
    if below.word == "sum":
        return "it divides by the root of a sum of squares, not of their mean"
    return _product_problem(view, node, below)


def _mean_square(view: View, root: Term) -> Term | None:
    """The mean, or sum, of squares under a root, with or without an eps added to it."""
    below = view.see(root.args[0])
    if below is not None and below.word == "add":
        terms = (t for t in map(view.see, below.args) if t is not None)
        below = next((t for t in terms if t.word in ("mean", "sum")), None)
    if below is None or below.word not in ("mean", "sum"):
        return None
    inner = view.see(below.args[0])
    return below if inner is not None and inner.word == "square" else None


def _product_problem(view: View, node: fx.Node, below: Term) -> str:
    source = _stripped(view, view.see(below.args[0]).args[0])
    products = [t for t in map(view.term, node.users) if t.word == "mul"]
    if not products:
        return "the root of the mean of squares does not scale the tensor that it is made of"
    if all(source is not _stripped(view, a) for t in products for a in t.args):
        return "what it scales is not the tensor whose squares are averaged"
    return "its parts do not combine to a form of RMSNorm that fxfuse knows"


def _stripped(view: View, operand: object) -> object:
    term = view.see(operand)
    while term is not None and term.word in ("cast", "same"):
        operand = term.args[0]
        term = view.see(operand)
    return operand


def _no_second_norm(b: Bound) -> Decline | None:
    other = b.view.see(b.other)
    if weight_problem(Norm(b, of="x")) or (other is not None and other.word == "silu"):
        return None
    shapes = b.shape("normed"), b.shape("other")
    if None not in shapes and not same_shape(*shapes):
        return None  # a bias
    return b.decline(
        "its norm comes before the add, and no norm of the sum follows: only the norm itself can "
        "be fused"
    )


POST_NORM = Fusion(
    "post-norm",
    named("h", upcast(rms_norm_of(var("x"))) + var("other")),
    _no_second_norm,
)


def post_norm(view: View, node: fx.Node) -> str | None:
    """Why a norm whose output is added to a residual is not fused with the add, or None."""
    if view.term(node).word != "add":
        return None
    reasons = (POST_NORM.build(b) for b in POST_NORM.ways(view, node))
    return next((found.reason for found in reasons if found is not None), None)
