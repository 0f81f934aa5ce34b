"""How means, sums of squares and the roots of both are spelt.

`sum / N` is read as a mean where N is the width, and so is the square of a vector norm over N; a
vector norm as the root of a sum of squares, and over the root of N as that of their mean. A
dimension that a reduction drops may be put back later.
"""

from __future__ import annotations

import torch
from torch import fx

from fxfuse.facts import known_equal
from fxfuse.shape_spellings import reshape
from fxfuse.term import Term, ViewLike, arguments, opaque, spelt

aten = torch.ops.aten
_WIDE = (torch.float32, torch.float64)

_DROPPED = "it drops the dimension that it reduces (keepdim=False)"


def _reduction(word: str, *spellings: object) -> None:
    @spelt(*spellings)
    def read(view: ViewLike, node: fx.Node) -> Term:
        names = ("input|self", "dim|axis", "keepdim|keepdims", "dtype")
        x, dim, keepdim, dtype = arguments(node, *names)
        flaw = _not_last(view, x, dim, word)
        if flaw is None and dtype is not None and view.facts.dtype(x) != dtype:
            flaw = f"the {word} casts to {str(dtype).removeprefix('torch.')} while it sums"
        if flaw is None and not keepdim:
            flaw = _DROPPED
        return Term(word, (x,), (node,), flaw)


_reduction("mean", torch.mean, ".mean", aten.mean.dim, aten.mean.default)
_reduction("sum", torch.sum, ".sum", aten.sum.dim_IntList, aten.sum.default)


def _not_last(view: ViewLike, x: object, dim: object, word: str) -> str | None:
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    dims = [view.facts.number(d) if isinstance(d, fx.Node) else d for d in dims]
    if None in dims and dim is not None:
        return f"the {word} is over a dimension that the graph computes"
    if dim is None or len(dims) == 0:
        return f"the {word} is over all dimensions, not the last"
    if len(dims) > 1:
        return f"the {word} is over {len(dims)} dimensions, not the last alone"
    if dims[0] == -1:
        return None
    shape = view.facts.shape(x)
    if shape is None:
        return f"the {word} is over dim {dims[0]}, and without shapes that may not be the last"
    return None if dims[0] == len(shape) - 1 else f"the {word} is over dim {dims[0]}, not the last"


def mean_of_sum(view: ViewLike, node: fx.Node, total: object, divisor: object) -> Term | None:
    """sum(x) / N as a mean, where N is the width of x: a number, or a node that holds the size."""
    term = view.see(total)
    if term is None or term.word != "sum":
        return None
    return Term("mean", term.args, (node, *term.nodes), term.flaw or _no_mean(view, term, divisor))


def _no_mean(view: ViewLike, total: Term, divisor: object) -> str | None:
    """Why a sum over the last dimension that is divided is not known to be a mean, or None."""
    shape = view.facts.shape(_tensor(view, total))
    width = shape[-1] if shape else None
    if width is None:
        return "the sum of squares is divided by a number that may not be the width (no shapes)"
    if isinstance(divisor, fx.Node):
        size = divisor.meta.get("example_value", divisor.meta.get("val"))
        return None if size is not None and known_equal(size, width) else _OTHER_WIDTH
    if not isinstance(width, int):
        return _OTHER_WIDTH
    if abs(divisor - width) > 1e-9 * width:
        return f"the sum of squares is divided by {divisor:g}, not by the width {width}"
    return None


_OTHER_WIDTH = "the sum of squares is divided by what is not known to be the (symbolic) width"


def _tensor(view: ViewLike, total: Term) -> object:
    """The tensor whose values, or their squares, are summed."""
    inner = total.args[0]
    while isinstance(inner, Term):
        inner = inner.args[0]
    return inner


def root_of_mean(view: ViewLike, node: fx.Node, root: object, factor: float) -> Term | None:
    """sqrt(sum(x)) / sqrt(N) as sqrt(mean(x)), and x / sqrt(sum(x)) * sqrt(N) likewise."""
    term = view.see(root)
    if term is None or term.flaw:
        return None
    if term.word == "sqrt":
        mean = _scaled_sum(view, term, 1 / factor**2)
        return mean and Term("sqrt", (mean,), (node, *term.nodes))
    if term.word == "mul":
        for x, other in (term.args, term.args[::-1]):
            below = view.see(other)
            if below is not None and below.word == "rsqrt":
                mean = _scaled_sum(view, below, factor**2)
                inner = mean and Term("rsqrt", (mean,), below.nodes)
                return inner and Term("mul", (x, inner), (node, *term.nodes))
    return None


def scaled_numerator(view: ViewLike, node: fx.Node, x: object, root: Term) -> Term | None:
    """sqrt(N) * x / sqrt(sum(y)) as x * rsqrt(mean(y))."""
    term = view.see(x)
    if term is None or term.word != "mul" or view.facts.dtype(x) not in _WIDE:
        return None  # a half would be rounded before it is divided
    for inner, factor in (term.args, term.args[::-1]):
        number = view.facts.constant(factor)
        mean = _scaled_sum(view, root, number**2) if number else None
        if mean:
            nodes = (node, *term.nodes)
            return Term("mul", (inner, Term("rsqrt", (mean,), root.nodes)), nodes)
    return None


def _scaled_sum(view: ViewLike, root: Term, divisor: float) -> Term | None:
    """What is under a root, (sum + eps) / N, as mean + eps / N."""
    total = view.see(root.args[0])
    if total is not None and total.word == "add" and not total.flaw:
        for inner, eps in (total.args, total.args[::-1]):
            number, mean = view.facts.constant(eps), _mean(view, view.see(inner), divisor)
            if number is not None and mean:
                return Term("add", (mean, number / divisor), total.nodes)
        return None
    return _mean(view, total, divisor)


def _mean(view: ViewLike, total: Term | None, divisor: float) -> Term | None:
    if total is None or total.word != "sum" or total.flaw or _no_mean(view, total, divisor):
        return None
    return Term("mean", total.args, total.nodes)


@spelt(torch.linalg.vector_norm, torch.norm, ".norm", aten.linalg_vector_norm.default,
       aten.norm.ScalarOpt_dim)  # fmt: skip
def _vector_norm(view: ViewLike, node: fx.Node) -> Term:
    """The root of the sum of the squares of the last dimension."""
    x, order, dim, keepdim = arguments(node, "input|self|x", "p|ord", "dim", "keepdim")
    if order not in (None, 2, "fro") or dim is None or _not_last(view, x, dim, "norm"):
        return opaque(node)
    given = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.dtype)]
    if given and given[0] != view.facts.dtype(x):
        x = Term("cast", (x,), (node,), dtype=given[0])
    return Term("sqrt", (_sum_of_squares(node, x, keepdim is True),), (node,))


def _sum_of_squares(node: fx.Node, x: object, keeps: bool) -> Term:
    """What one node computes of the last dimension of x, in words."""
    square = Term("square", (x,), (node,))
    return Term("sum", (square,), (node,), None if keeps else _DROPPED)


@spelt(torch.linalg.vecdot, aten.linalg_vecdot.default)
def _vecdot(view: ViewLike, node: fx.Node) -> Term:
    x, y, dim = arguments(node, "x", "y", "dim")
    if x is not y or dim not in (None, -1):
        return opaque(node)
    return _sum_of_squares(node, x, keeps=False)


@spelt(torch.einsum, torch.functional.einsum, aten.einsum.default)
def _einsum(view: ViewLike, node: fx.Node) -> Term:
    """The squares of the last dimension, summed: "...d,...d->..." of one tensor."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = operands[0]
    if not isinstance(equation, str) or len(operands) != 2 or operands[0] is not operands[1]:
        return opaque(node)
    given, _, result = equation.replace(" ", "").partition("->")
    one, _, other = given.partition(",")
    summed = one[-1:]
    rows = one[:-1].replace("...", "")
    plain = one == other and one[:-1] == result and summed.isalpha() and summed not in rows
    if not plain or len(set(rows)) < len(rows):
        return opaque(node)
    return _sum_of_squares(node, operands[0], keeps=False)


@spelt(torch.nn.functional.normalize)
def _normalize(view: ViewLike, node: fx.Node) -> Term:
    return Term("unit_length", node.args[:1], (node,))


def _deviation(word: str, *spellings: object) -> None:
    @spelt(*spellings)
    def read(view: ViewLike, node: fx.Node) -> Term:
        return Term(word, node.args[:1], (node,))


_deviation("std", torch.std, ".std", aten.std.correction, aten.std.dim)
_deviation("var", torch.var, ".var", aten.var.correction, aten.var.dim)


@spelt(torch.unsqueeze, ".unsqueeze", aten.unsqueeze.default)
def _unsqueeze(view: ViewLike, node: fx.Node) -> Term:
    x, dim = arguments(node, "input|self", "dim")
    shape = view.facts.shape(x)
    is_last = dim == -1 or (shape is not None and dim == len(shape))
    back = kept(view, node, x) if is_last else None
    return back or reshape(view, node, x)


def kept(view: ViewLike, node: fx.Node, x: object) -> Term | None:
    """A reduction without keepdim, or a root of one, whose dimension is put back."""
    term = view.see(x)
    if term is None:
        return None
    if term.flaw == _DROPPED:
        return Term(term.word, term.args, (node, *term.nodes))
    if term.flaw is None and term.word in ("rsqrt", "sqrt", "add", "mul", "div"):
        numbers = [view.facts.is_number(a) for a in term.args]
        if numbers.count(False) == 1:
            at = numbers.index(False)
            inner = kept(view, node, term.args[at])
            args = (*term.args[:at], inner, *term.args[at + 1 :])
            return inner and Term(term.word, args, term.nodes)
    return None
