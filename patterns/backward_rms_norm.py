"""The gradient of an RMSNorm that autograd wrote out in plain ops.

With g = dy * weight, r = rstd and N columns

    dh = g * r - h * r ** 3 * sum(g * h) / N [+ dres, the gradient that h gets elsewhere]
    dweight = sum over the rows of dy * h * r

which is the same function of g, h and r whatever r is, so r may be an input of the graph.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

import fxfuse.kernels.ops  # noqa: F401  (defines the op)
from fxfuse.match import Bound, Call, Derived, holding, maybe_cast, named, same_shape, var, word
from fxfuse.patterns.norms import FLOATS, HALVES
from fxfuse.patterns.products import Product, bare, product
from fxfuse.registry import pattern

aten = torch.ops.aten

total = named("total", word("add", var("one"), var("other")))
gradient = holding(maybe_cast(total, "out_cast"), "add", "mul", "sum", "power")


@pattern("backward_rms_norm", gradient, size=3, backward=True)
def build(b: Bound) -> Call | None:
    """The gradients of an RMSNorm's input and weight, in one kernel."""
    if not b.facts.after_autograd:
        return None
    found = [(norm, _parts(b, b.total, norm)) for norm in _norms(b)]
    found = [(n, p) for n, p in found if _adds_up(b, n, p.products) and _fits(b, n, p.rest)]
    if not found:
        return None
    # Of several norms of one tensor the one whose gradient was added last.
    norm, parts = min(found, key=lambda pair: len(pair[1].rest))
    b.nodes.extend((*norm.nodes, *parts.nodes))
    return _call(b, norm, parts.rest)


def _call(b: Bound, norm: _Norm, rest: list[fx.Node]) -> Call:
    scaled = _scaled(b, norm)
    b.nodes.extend(scaled.nodes)
    need_dweight = _take_dweight(b, norm, scaled)
    rstd = Derived(aten.squeeze.dim, (norm.r, -1), b.facts.value(norm.r).squeeze(-1))
    return b.call(
        torch.ops.fxfuse.rms_norm_bwd.default,
        [scaled.dy],
        norm.h,
        scaled.weight,
        rstd,
        _sum(b, rest),
        outputs=("dh", "dweight"),
        weight_offset=scaled.offset,
        need_dweight=need_dweight,
    )


# ---- dh ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Norm:
    """row_sum: the node sum(g * h); nodes: what computes it."""

    row_sum: fx.Node
    g: fx.Node
    h: fx.Node
    r: fx.Node
    nodes: tuple[fx.Node, ...]

    @property
    def stops(self) -> tuple[fx.Node, ...]:
        return (self.row_sum, self.g, self.h, self.r)

    @property
    def direct(self) -> Counter:
        return Counter([self.g, self.r])

    @property
    def correction(self) -> Counter:
        return Counter({self.row_sum: 1, self.h: 1, self.r: 3})


@dataclass(frozen=True)
class _Parts:
    """A sum as products that belong to a norm and the rest; nodes: what computes the products and
    adds all up.
    """

    products: list[Product]
    rest: list[fx.Node]
    nodes: tuple[fx.Node, ...]


def _norms(b: Bound) -> Iterator[_Norm]:
    """The norms of which a term of the sum may be the correction: h * r ** 3 * sum(g * h)."""
    for term in _terms(b, b.total):
        nodes = [a for a in product(b, term).powers if isinstance(a, fx.Node)]
        for row_sum in (n for n in nodes if b.view.term(n).word == "sum"):
            for g, h, nodes in _multiplied(b, row_sum):
                powers = product(b, term, (row_sum, h)).powers
                for r, power in powers.items():
                    norm = _Norm(row_sum, g, h, r, nodes)
                    if power == 3 and isinstance(r, fx.Node) and powers == norm.correction:
                        yield norm


def _terms(b: Bound, node: fx.Node) -> Iterator[fx.Node]:
    term = b.view.term(node)
    if not _is_part(b, node):
        yield node
        return
    for operand in term.args:
        yield from _terms(b, operand)


def _is_part(b: Bound, node: fx.Node) -> bool:
    """Whether a node is the sum, or an add of two tensors that is only used by the sum."""
    if node is b.total:
        return True
    term = b.view.term(node)
    tensors = all(isinstance(operand, fx.Node) for operand in term.args)
    return term.word == "add" and tensors and len(node.users) == 1


def _multiplied(b: Bound, row_sum: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, tuple]]:
    """The two factors of what is summed, in both orders, and what computes the sum from them."""
    term = b.view.term(row_sum)
    if term.flaw:
        return
    inner, passed = bare(b, term.args[0])
    below = b.view.term(inner)
    if below.word != "mul" or not all(isinstance(a, fx.Node) for a in below.args):
        return
    (one, to_one), (other, to_other) = (bare(b, a) for a in below.args)
    nodes = (*term.nodes, *passed, *below.nodes, *to_one, *to_other)
    yield one, other, nodes
    yield other, one, nodes


def _parts(b: Bound, node: fx.Node, norm: _Norm) -> _Parts:
    found = product(b, node, norm.stops)
    if found.powers in (norm.direct, norm.correction):
        return _Parts([found], [], found.nodes)
    if not _is_part(b, node):
        return _Parts([], [node], ())
    term = b.view.term(node)
    one, other = (_parts(b, operand, norm) for operand in term.args)
    if not one.products and not other.products:
        return _Parts([], [node], ())
    nodes = (*term.nodes, *one.nodes, *other.nodes)
    return _Parts(one.products + other.products, one.rest + other.rest, nodes)


def _adds_up(b: Bound, norm: _Norm, products: list[Product]) -> bool:
    """Whether the products have the right coefficients, each over all terms."""
    shape = b.facts.shape(norm.h)
    if not shape or not isinstance(shape[-1], int) or shape[-1] == 0:
        return False
    direct = sum(p.factor for p in products if p.powers == norm.direct)
    correction = sum(p.factor for p in products if p.powers == norm.correction)
    return direct == 1 and math.isclose(correction, -1 / shape[-1], rel_tol=1e-9)


def _fits(b: Bound, norm: _Norm, rest: list[fx.Node]) -> bool:
    """Whether shapes and dtypes are those between which the op computes."""
    facts, shape = b.facts, b.facts.shape(norm.h)
    wide, own = facts.dtype(norm.r), facts.dtype(norm.h)
    if len(shape) < 2 or wide not in FLOATS or wide in HALVES:
        return False
    column = (*shape[:-1], 1)
    shapes = {norm.g: shape, norm.h: shape, norm.r: column, norm.row_sum: column, b.total: shape}
    return (
        all(_has(b, norm, node, shapes[node]) for node in shapes)
        and all(_has(b, norm, node, shape) and facts.dtype(node) == own for node in rest)
        and facts.dtype(norm.row_sum) == wide
        and facts.dtype(b.total) in (own, wide)
        and facts.dtype(b.root) == own
    )


def _sum(b: Bound, rest: list[fx.Node]) -> fx.Node | Derived | None:
    """The gradient that h gets elsewhere."""
    if not rest:
        return None
    total, value = rest[0], b.facts.value(rest[0])
    for node in rest[1:]:
        value = value + b.facts.value(node)
        total = Derived(aten.add.Tensor, (total, node), value)
    return total


# ---- dweight -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scaled:
    """g as dy * (weight + offset); nodes: what computes it from these."""

    dy: fx.Node
    weight: fx.Node | None = None
    offset: float = 0.0
    nodes: tuple[fx.Node, ...] = ()


def _scaled(b: Bound, norm: _Norm) -> _Scaled:
    """g without its last factor, if that is one value per column."""
    term, outer = b.view.term(norm.g), ()
    if term.word == "cast":
        inner, passed = bare(b, term.args[0])
        term, outer = b.view.term(inner), (*term.nodes, *passed)
    if term.word != "mul":
        return _Scaled(norm.g)
    shape = b.facts.shape(norm.h)
    for one, other in (term.args, term.args[::-1]):
        (dy, to_dy), (weight, to_weight) = bare(b, one), bare(b, other)
        if _has(b, norm, dy, shape) and _has(b, norm, weight, shape[-1:]):
            weight, offset, shift = _unshifted(b, norm, weight)
            nodes = (*outer, *term.nodes, *to_dy, *to_weight, *shift)
            return _Scaled(dy, weight, offset, nodes)
    return _Scaled(norm.g)


def _has(b: Bound, norm: _Norm, operand: object, shape: tuple) -> bool:
    """Whether an operand has a shape, and a dtype from which a cast to that of rstd keeps all."""
    found, dtype = b.facts.shape(operand), b.facts.dtype(operand)
    if found is None or dtype not in FLOATS or not same_shape(found, shape):
        return False
    wide = b.facts.dtype(norm.r)
    return torch.promote_types(dtype, wide) == wide


def _unshifted(b: Bound, norm: _Norm, scale: fx.Node) -> tuple[fx.Node, float, tuple]:
    """A scale as a weight and a number that is added to it in the dtype of the statistic."""
    term = b.view.term(scale)
    if term.word == "add" and b.facts.dtype(scale) == b.facts.dtype(norm.r):
        for one, other in (term.args, term.args[::-1]):
            number, (weight, passed) = b.facts.number(one), bare(b, other)
            if number is not None and _has(b, norm, weight, b.facts.shape(scale)):
                return weight, float(number), (*term.nodes, *passed)
    return scale, 0.0, ()


def _take_dweight(b: Bound, norm: _Norm, scaled: _Scaled) -> bool:
    """Let the match cover and return the weight's gradient, if the graph computes it from h."""
    if scaled.weight is None:
        return False
    stops = (scaled.dy, norm.h, norm.r)
    for node in _multiples(b, scaled.dy):
        found = product(b, node, stops)
        if found.powers == Counter(stops) and found.factor == 1:
            for user in node.users:
                steps = _over_rows(b, user, scaled.weight)
                if steps:
                    b.nodes.extend((*found.nodes, *steps))
                    return b.bind("dweight", steps[-1])
    return False


def _multiples(b: Bound, node: fx.Node) -> Iterator[fx.Node]:
    """The products that a node, or a cast of it that loses nothing, goes into."""
    for user in node.users:
        word = b.view.term(user).word
        if word == "mul":
            yield user
        elif word in ("cast", "same", "detach") and bare(b, user)[0] is not user:
            yield from _multiples(b, user)


def _over_rows(b: Bound, node: fx.Node, weight: fx.Node) -> list[fx.Node]:
    """From a sum over all rows on, the steps to a gradient for the weight; none if they are not."""
    if node.target is not aten.sum.dim_IntList or node.kwargs:
        return []
    rows = len(b.facts.shape(node.args[0]) or (0,)) - 1
    if sorted(node.args[1]) != list(range(rows)):
        return []
    steps = [node]
    while not _is_like(b, steps[-1], weight):
        (user, *more) = steps[-1].users or [None]
        if user is None or more or b.view.term(user).word not in ("view", "cast", "same"):
            return []
        steps.append(user)
    return steps


def _is_like(b: Bound, node: fx.Node, weight: fx.Node) -> bool:
    found = b.facts.shape(node) or ()
    right = b.facts.shape(weight), b.facts.dtype(weight)
    return same_shape(found, right[0]) and b.facts.dtype(node) == right[1]
