"""How means, sums of squares and the roots of both are spelt.

`sum / N` is read as a mean where N is the width, and so is the square of a vector norm over N; a
vector norm as the root of a sum of squares, and over the root of N as that of their mean. A
dimension that a reduction drops may be put back later.
"""

from __future__ import annotations

import torch
from torch import fx

from fxfuse.facts import known_equal
from fxfuse.kept_dims import DROPPED
from fxfuse.powers import width_of
from fxfuse.term import Term, ViewLike, arguments, is_number, opaque, spelt

aten = torch.ops.aten


def _reduction(word: str, *spellings: object) -> None:
    @spelt(*spellings)
    def read(view: ViewLike, node: fx.Node) -> Term:
        names = ("input|self", "dim|axis", "keepdim|keepdims", "dtype")
        x, dim, keepdim, dtype = arguments(node, *names)
        flaw = _not_last(view, x, dim, word)
        if flaw is None and dtype is not None and view.facts.dtype(x) != dtype:
            flaw = f"the {word} casts to {str(dtype).removeprefix('torch.')} while it sums"
        elif flaw is not None and view.facts.dim != -1:
            return opaque(node)
        if flaw is None and not keepdim and not _is_vector(view, x):
            flaw = DROPPED
        return Term(word, (x,), (node,), flaw)


_reduction("mean", torch.mean, ".mean", aten.mean.dim, aten.mean.default)
_reduction("sum", torch.sum, ".sum", aten.sum.dim_IntList, aten.sum.default)


def _not_last(view: ViewLike, x: object, dim: object, word: str) -> str | None:
    if view.facts.dim == -1 and dim in (None, (), []) and _is_vector(view, x):
        return None
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    dims = [view.facts.number(d) if isinstance(d, fx.Node) else d for d in dims]
    if None in dims and dim is not None:
        return f"the {word} is over a dimension that the graph computes"
    if dim is None or len(dims) == 0:
        return f"the {word} is over all dimensions, not the last"
    if len(dims) > 1:
        return f"the {word} is over {len(dims)} dimensions, not the last alone"
    return _not_along(view, view.facts.shape(x), dims[0], word)


def _is_vector(view: ViewLike, x: object) -> bool:
    """Whether a tensor is one row: a single number goes with it as a column of one does."""
    return len(view.facts.shape(x) or ()) == 1


def _not_along(view: ViewLike, shape: tuple | None, dim: int, word: str) -> str | None:
    """Why a reduction over one dimension is not over that of the view, or None."""
    if dim == -1 == view.facts.dim:
        return None
    if shape is None:
        return f"the {word} is over dim {dim}, and without shapes that may not be the last"
    at = dim % max(len(shape), 1)
    is_last = at == len(shape) - 1
    if is_last if view.facts.dim == -1 else at == view.facts.dim and not is_last:
        return None
    if not is_last:
        view.facts.others.add(at)
    return f"the {word} is over dim {dim}, not the last"


def mean_of_sum(view: ViewLike, node: fx.Node, total: object, divisor: object) -> Term | None:
    """sum(x) / N as a mean, where N is the width of x: a number, or a node that holds the size."""
    term = view.see(total)
    if term is None or term.word != "sum":
        return None
    width = width_of(view.facts, term)
    known = isinstance(width, int) and is_number(divisor)
    if known and abs(divisor - width) > 1e-9 * width:
        return None
    return Term("mean", term.args, (node, *term.nodes), _no_mean(width, divisor) or term.flaw)


def _no_mean(width: object, divisor: object) -> str | None:
    """Why a sum over the last dimension that is divided is not known to be a mean, or None."""
    if width is None:
        return "the sum of squares is divided by a number that may not be the width (no shapes)"
    if isinstance(divisor, fx.Node):
        size = divisor.meta.get("example_value", divisor.meta.get("val"))
        return None if size is not None and known_equal(size, width) else _OTHER_WIDTH
    return None if isinstance(width, int) else _OTHER_WIDTH


_OTHER_WIDTH = "the sum of squares is divided by what is not known to be the (symbolic) width"


@spelt(torch.nn.functional.adaptive_avg_pool1d, aten.adaptive_avg_pool1d.default)
def _pool(view: ViewLike, node: fx.Node) -> Term:
    """A pool of one value has the mean of all that it pools."""
    x, size = arguments(node, "input|self", "output_size")
    if size not in (1, (1,), [1]) or _not_last(view, x, -1, "mean"):
        return opaque(node)
    return Term("mean", (x,), (node,))


@spelt(torch.linalg.vector_norm, torch.norm, torch.linalg.norm, ".norm",
       aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim)  # fmt: skip
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
    return Term("sum", (square,), (node,), None if keeps else DROPPED)


@spelt(torch.linalg.vecdot, aten.linalg_vecdot.default)
def _vecdot(view: ViewLike, node: fx.Node) -> Term:
    x, y, dim = arguments(node, "x", "y", "dim")
    if x is not y or _not_last(view, x, -1 if dim is None else dim, "sum"):
        return opaque(node)
    return _sum_of_squares(node, x, keeps=False)


@spelt(torch.einsum, torch.functional.einsum, aten.einsum.default)
def _einsum(view: ViewLike, node: fx.Node) -> Term:
    """Sums of the last dimension, of one tensor or its squares, and rows times a vector."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = operands[0]
    if not isinstance(equation, str) or view.facts.dim != -1:
        return opaque(node)
    given, _, result = equation.replace(" ", "").partition("->")
    subscripts = given.split(",")
    rows = max(subscripts, key=len)
    letters = rows.replace("...", "")
    if not letters.isalpha() or len(set(letters)) < len(letters) or rows.endswith("..."):
        return opaque(node)
    if result == rows[:-1] and set(subscripts) == {rows} and len(set(operands)) == 1:
        if len(operands) == 1:
            return Term("sum", (operands[0],), (node,), DROPPED)
        return (
            _sum_of_squares(node, operands[0], keeps=False) if len(operands) == 2 else opaque(node)
        )
    if result == rows and sorted(subscripts) == sorted((rows, rows[-1])):
        return Term("mul", tuple(operands), (node,))
    return opaque(node)


@spelt(torch.nn.functional.normalize)
def _normalize(view: ViewLike, node: fx.Node) -> Term:
    return Term("unit_length", node.args[:1], (node,))


def _deviation(word: str, *spellings: object) -> None:
    @spelt(*spellings)
    def read(view: ViewLike, node: fx.Node) -> Term:
        return Term(word, node.args[:1], (node,))


def mean_of_squares(view: ViewLike, node: fx.Node, x: object, y: object) -> Term | None:
    """var(x) + mean(x) ** 2 of the last dimension, where var divides by N, as mean(x ** 2)."""
    for variance, other in ((x, y), (y, x)):
        var, square = view.see(variance), view.see(other)
        if var is None or square is None or (var.word, square.word) != ("var", "square"):
            continue
        mean = view.see(square.args[0])
        if mean is None or mean.word != "mean" or mean.flaw or mean.args != var.args:
            continue
        if _is_mean_of_deviations(view, var.nodes[-1]):
            nodes = (node, *var.nodes, *square.nodes, *mean.nodes)
            return Term("mean", (Term("square", var.args, nodes),), nodes)
    return None


def _is_mean_of_deviations(view: ViewLike, var: fx.Node) -> bool:
    x, dim, unbiased, keepdim = arguments(var, "input|self", "dim", "unbiased", "keepdim")
    divides_by_width = unbiased is False or var.kwargs.get("correction") == 0
    given = dim is not None and not isinstance(dim, bool)  # var(x, False) is of all dimensions
    return given and keepdim is True and divides_by_width and not _not_last(view, x, dim, "var")


def moment(view: ViewLike, node: fx.Node, call: fx.Node, index: int) -> Term:
    """The variance or the mean out of a call that has both."""
    x, dim, _, keepdim = arguments(call, "input|self", "dim", "unbiased", "keepdim")
    if index == 0:
        return Term("var", (x,), (node, call))
    flaw = _not_last(view, x, dim, "mean") or (None if keepdim is True else DROPPED)
    return Term("mean", (x,), (node, call), flaw)


def filling(view: ViewLike, operand: object) -> Term | None:
    """A new tensor of one number, perhaps in another shape: its number, and all its nodes."""
    term, nodes = view.see(operand), ()
    while term is not None and term.word in ("view", "expand", "cast"):
        nodes += term.nodes
        term = view.see(term.args[0])
    if term is None or term.word != "filled":
        return None
    own = view.memory.roots(term.nodes[0])
    if any(own & view.memory.roots(write.target) for write in view.memory.writes()):
        return None
    return Term("filled", term.args, nodes + term.nodes)


VAR_MEAN = (torch.var_mean, aten.var_mean.correction, aten.var_mean.dim)


@spelt(torch.nn.functional.mse_loss, aten.mse_loss.default)
def _squared_distance(view: ViewLike, node: fx.Node) -> Term:
    """From zero, each element's: its square."""
    x, y, reduction = arguments(node, "input|self", "target", "reduction")
    kept = node.kwargs.get("reduction", reduction) in ("none", 0) and not node.kwargs.get("weight")
    same = view.facts.shape(x) == view.facts.shape(y) is not None
    for one, other in ((x, y), (y, x)):
        zeros = filling(view, other)
        if kept and same and zeros is not None and zeros.args[0] == 0:
            return Term("square", (one,), (node, *zeros.nodes))
    return opaque(node)


_deviation("std", torch.std, ".std", aten.std.correction, aten.std.dim)
_deviation("var", torch.var, ".var", aten.var.correction, aten.var.dim)
