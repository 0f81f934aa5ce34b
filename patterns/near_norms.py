"""What looks like a norm and is none that the patterns know: one sentence for each."""

from __future__ import annotations

import functools

import torch
from torch import fx

from fxfuse.match import (
    Bound,
    Decline,
    Fusion,
    Term,
    View,
    behind_casts,
    named,
    power_of,
    same_shape,
    upcast,
    var,
    width_of,
)
from fxfuse.patterns.centred import CENTRED, is_centred
from fxfuse.patterns.norms import HALVES, Norm, name_of, rms_norm_of, weight_problem

_DEVIATION = "it divides by a standard deviation, not by the root of a mean of squares"
_VECTOR_NORM = "it divides by a vector norm, not by the root of a mean of squares"
_NORMALIZE = (
    "it divides by a vector norm that has a least value: F.normalize clamps that norm instead of "
    "adding an eps"
)
_EPS_OUTSIDE = "its eps is added outside of the root"
_CLAMPED = "its root is clamped, which that of an RMSNorm is not"
_MEAN_OF_MEANS = "it takes the mean of means, which is over more than the last dimension"
_DOUBLED = (
    "a LayerNorm of [x, -x] gives the RMSNorm of x, but fxfuse does not read it so: write "
    "F.rms_norm(x, ...)"
)
_UNUSED = "the root of the mean of squares does not scale the tensor that it is made of"
_DETACHED = "its statistic is detached: no gradient flows through it, as one does in RMSNorm"
_TENSOR_EPS = "its eps is a tensor, and the op takes a number"
_TENSOR_EXPONENT = "its exponent is a tensor, which may hold another number than 2"
_OTHER = "what it scales is not the tensor whose squares are averaged"
_CLAMPS = ("clamp", "clamp_min", "maximum", "max")


def near_miss(view: View, node: fx.Node) -> str | None:
    """Why a whole norm, or what a tensor is divided by, is no RMSNorm; None for other nodes."""
    term = view.term(node)
    if term.word == "rms_norm":
        return term.flaw or "it is not in a form that the op computes"
    if term.word == "unit_length":
        return _NORMALIZE
    if _is_doubled(view, node):
        return _DOUBLED
    if term.word == "std":
        return _DEVIATION if _divides(view, node) else None
    if term.word not in ("rsqrt", "sqrt"):
        return None
    below = _under_root(view, term)
    if below is None:
        return _scale_problem(view, node)
    if below.word == "var":
        return _DEVIATION if term.word == "rsqrt" or _divides(view, node) else None
    if below.word == "sum" and node in below.nodes:
        return _VECTOR_NORM if _divides(view, node) else None
    if below.flaw:
        return below.flaw
    if below.word == "sum":
        return "it divides by the root of a sum of squares, not of their mean"
    return _product_problem(view, node, below)


def _scale_problem(view: View, node: fx.Node) -> str | None:
    """Why a root of a mean of squares that is multiplied by a number is none of a mean, or None."""
    power = power_of(view, node)
    squares = view.see(power.total.args[0]) if power else None
    if squares is None or squares.word != "square" or abs(power.exponent) != 0.5:
        return None
    if power.exponent > 0 and not _divides(view, node):
        return None
    width = width_of(view.facts, power.total)
    if power.total.word == "sum" and width is not None:
        return f"the sum of squares is divided by {1 / power.scale:g}, not by the width {width}"
    return f"its {power.total.word} of squares is multiplied by {power.scale:g}"


def _under_root(view: View, root: Term) -> Term | None:
    """The variance, mean or sum of squares under a root, with or without an eps added to it."""
    below = view.see(root.args[0])
    if below is not None and any(_kind(node) in _CLAMPS for node in below.nodes):
        clamped = view.see(below.nodes[0].args[0]) if below.nodes[0].args else None
        is_mean = clamped is not None and clamped.word == "mean" and not clamped.flaw
        return Term("mean", clamped.args, below.nodes, _CLAMPED) if is_mean else None
    if below is not None and below.word == "add":
        added = below
        terms = [t for t in map(view.see, below.args) if t is not None]
        terms += [t for sum in terms if sum.word == "add" for t in map(view.see, sum.args) if t]
        below = next((t for t in terms if t.word in ("mean", "sum", "var", "detach")), None)
        numbers = any(view.facts.is_number(a) for a in added.args)
        if below is not None and below.word == "mean" and not numbers and not below.flaw:
            below = Term("mean", below.args, below.nodes, _TENSOR_EPS)
    if below is not None and below.word == "detach":
        below = view.see(below.args[0])
        if below is not None and below.word == "mean" and not below.flaw:
            below = Term("mean", below.args, below.nodes, _DETACHED)
    if below is None or below.word not in ("mean", "sum", "var"):
        return None
    if below.word == "var":
        return below
    inner = view.see(below.args[0])
    if inner is not None and inner.word == "mean":
        squares = view.see(inner.args[0])
        is_norm = squares is not None and squares.word == "square"
        return Term("mean", inner.args, below.nodes, _MEAN_OF_MEANS) if is_norm else None
    if inner is not None and inner.word == "cast" and not below.flaw:
        below = Term(
            below.word, inner.args, below.nodes, "its squares are rounded before their mean"
        )
        inner = view.see(inner.args[0])
    if inner is not None and inner.word == "power" and isinstance(inner.args[1], fx.Node):
        return Term(below.word, below.args, below.nodes, below.flaw or _TENSOR_EXPONENT)
    return below if inner is not None and inner.word == "square" else None


def _is_doubled(view: View, node: fx.Node) -> bool:
    """Whether it is a LayerNorm of a tensor beside its negative, whose mean is zero."""
    source = node.args[0] if _kind(node) in ("layer_norm", "native_layer_norm") else None
    if not isinstance(source, fx.Node) or _kind(source) not in ("cat", "concat"):
        return False
    parts = source.args[0] if source.args else None
    if not isinstance(parts, (list, tuple)) or len(parts) != 2:
        return False
    return any(
        isinstance(b, fx.Node) and _kind(b) in ("neg", "negative") and a in b.args
        for a, b in (parts, parts[::-1])
    )


def _divides(view: View, node: fx.Node) -> bool:
    """Whether a tensor is divided by a node, with or without an eps added to it or a clamp."""
    for user in node.users:
        term = view.term(user)
        if (term.word == "div" and term.args[1] is node) or term.word in ("reciprocal", "rsqrt"):
            return True
        if term.word == "mul" and any(isinstance(a, Term) and node in a.nodes for a in term.args):
            return True
        passes = (
            term.word in ("cast", "expand", "same")
            or _kind(user) in _CLAMPS
            or _adds_number(view, term)
        )
        if passes and _divides(view, user):
            return True
    return False


def _adds_number(view: View, term: Term) -> bool:
    return term.word == "add" and any(view.facts.number(a) is not None for a in term.args)


def _kind(node: fx.Node) -> str:
    """The name of what a node calls."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.removeprefix("aten::")
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _product_problem(view: View, node: fx.Node, below: Term) -> str:
    strip = functools.partial(behind_casts, view)
    source = strip(view.see(below.args[0]).args[0])
    readers = list(node.users)
    for reader in readers:
        passes = view.term(reader).word in ("cast", "expand", "same", "detach")
        readers += reader.users if passes or power_of(view, reader) else ()
    terms = [view.term(reader) for reader in readers]
    if any(_adds_number(view, term) for term in terms):
        return _EPS_OUTSIDE
    if any(_kind(reader) in _CLAMPS for reader in readers):
        return _CLAMPED
    if any(view.memory.writes_of(reader) for reader in readers):
        return "it scales a tensor in place that is used elsewhere"
    products = [t for t in terms if t.word in ("mul", "div")]
    if not products:
        return _UNUSED
    scaled = [strip(a) for t in products for a in t.args]
    if is_centred(view, source) and any(is_centred(view, s) for s in scaled):
        return CENTRED
    if all(source is not s for s in scaled):
        below = view.see(source)
        detached = below is not None and below.word == "detach"
        source = strip(below.args[0]) if detached else None
        return _DETACHED if any(source is s for s in scaled if detached) else _OTHER
    if any(t.word == "detach" for t in terms):
        return _DETACHED
    rounded = {view.facts.dtype(r) for r, t in zip(readers, terms) if t.word == "cast"} & {*HALVES}
    if rounded and all(t.word == "div" for t in products if source in map(strip, t.args)):
        return f"its root is rounded to {name_of(rounded.pop())} before it divides"
    return "its parts do not combine to a form of RMSNorm that fxfuse knows"


def near_sum(view: View, node: fx.Node) -> str | None:
    """Why a sum that a norm reads, perhaps after one more step, is not taken in, or None."""
    term = view.term(node)
    steps = () if view.facts.after_autograd else ("add", "cast", "mul", "div")
    if term.word not in steps or not _is_normed(view, node):
        return None
    if term.word == "add":
        return f"{term.flaw}: the sum stays outside" if term.flaw else None
    sums = [t for t in map(view.see, term.args) if t is not None and t.word == "add"]
    if not any(all(isinstance(a, fx.Node) for a in t.args) for t in sums):
        return None
    if term.word == "cast":
        if view.facts.dtype(node) == view.facts.dtype(term.args[0]):
            return None
        return "the sum is cast before it is normed: it stays outside"
    return "the sum is scaled before it is normed: it stays outside"


def _is_normed(view: View, node: fx.Node) -> bool:
    """Whether the squares of a node are taken, or a norm in one piece."""
    words = [view.term(user).word for user in node.users]
    casts = [u for u, word in zip(node.users, words) if word == "cast"]
    return any(word in ("square", "rms_norm") for word in words) or any(
        view.term(user).word == "square" for cast in casts for user in cast.users
    )


def _no_second_norm(b: Bound) -> Decline | None:
    other = b.view.see(b.other)
    if weight_problem(Norm(b, of="x")) or (other is not None and other.word == "silu"):
        return None
    shapes = b.shape("normed"), b.shape("other")
    if shapes[1] is not None and len(shapes[1]) < 2:
        return None  # a bias
    if None not in shapes and not same_shape(*shapes):
        return None
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
