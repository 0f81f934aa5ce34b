"""How each word of the vocabulary is spelt in PyTorch, in every dialect.

`x / sqrt(v)` is read as `x * rsqrt(v)`, `sum / N` as `mean`, `x * x` and `x ** 2` as `square`, a
safe in-place form as the functional one. Gates and views have files of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from fxfuse.facts import known_equal, same_shape
from fxfuse.gate_spellings import (
    LEAF_ACTIVATIONS,
    activation,
    is_fresh,
    silu_of_product,
    silu_of_quotient,
)
from fxfuse.shape_spellings import reshape
from fxfuse.term import Attr, Term, ViewLike, arguments, is_number, opaque, spelt

aten = torch.ops.aten
prims = torch.ops.prims

# ---- arithmetic -------------------------------------------------------------------------------

_IN_PLACE = {
    operator.iadd, operator.imul, operator.itruediv, operator.ipow,
    aten.add_.Tensor, aten.add_.Scalar, aten.mul_.Tensor, aten.mul_.Scalar,
    aten.div_.Tensor, aten.div_.Scalar, aten.pow_.Scalar,
    aten.rsqrt_.default, aten.sqrt_.default, aten.reciprocal_.default,
}  # fmt: skip


def _safe(view: ViewLike, node: fx.Node, x: object, y: object) -> bool:
    """A functional op, or one that could as well be: it writes to a fresh tensor that nothing else
    reads, and keeps a dtype that promotion would give.
    """
    in_place = node.target in _IN_PLACE if node.op == "call_function" else node.target.endswith("_")
    if not in_place:
        return True
    if not is_fresh(view, x):
        return False
    if is_number(y):
        return True
    dtypes = view.facts.dtype(x), view.facts.dtype(y)
    return None not in dtypes and torch.promote_types(*dtypes) == dtypes[0]


@spelt(
    operator.add, operator.iadd, torch.add, ".add", ".add_",
    aten.add.Tensor, aten.add.Scalar, aten.add_.Tensor, aten.add_.Scalar,
)  # fmt: skip
def _add(view: ViewLike, node: fx.Node) -> Term:
    x, y, alpha = arguments(node, "input|self", "other", "alpha")
    if not _safe(view, node, x, y):
        return opaque(node)
    plain = alpha is None or (is_number(alpha) and alpha == 1)
    flaw = None if plain else f"the add multiplies an operand (alpha={alpha})"
    return Term("add", (x, y), (node,), flaw)


@spelt(operator.sub, torch.sub, torch.subtract, ".sub", ".subtract", aten.sub.Tensor)
def _sub(view: ViewLike, node: fx.Node) -> Term:
    return Term("sub", tuple(arguments(node, "input|self", "other")), (node,))


@spelt(
    operator.mul, operator.imul, torch.mul, torch.multiply, ".mul", ".mul_", ".multiply",
    aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor, aten.mul_.Scalar,
)  # fmt: skip
def _mul(view: ViewLike, node: fx.Node) -> Term:
    x, y = arguments(node, "input|self", "other")
    if not _safe(view, node, x, y):
        return opaque(node)
    if x is y and isinstance(x, fx.Node):
        return Term("square", (x,), (node,))
    for other, factor in ((x, y), (y, x)):
        if is_number(factor) and factor == 1 and view.facts.dtype(other) == view.facts.dtype(node):
            return Term("same", (other,), (node,))
        if is_number(factor) and factor > 0:
            mean = _mean_of_sum(view, node, other, 1 / factor)
            mean = mean or _root_of_mean(view, node, other, factor)
            if mean:
                return mean
    return silu_of_product(view, node, x, y) or Term("mul", (x, y), (node,))


@spelt(
    operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide,
    ".div", ".div_", ".divide", ".true_divide",
    aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor, aten.div_.Scalar,
)  # fmt: skip
def _div(view: ViewLike, node: fx.Node) -> Term:
    x, y = arguments(node, "input|self", "other")
    if node.kwargs.get("rounding_mode") or not _safe(view, node, x, y):
        return opaque(node)
    below = view.see(y)
    if below and below.word == "sqrt":
        if is_number(x) and x == 1:
            return Term("rsqrt", below.args, (node, *below.nodes))
        scaled = _scaled_numerator(view, node, x, below)
        return scaled or Term("mul", (x, Term("rsqrt", below.args, below.nodes)), (node,))
    divisor = view.facts.number(y)
    mean = None
    if divisor is not None or not view.facts.is_tensor(y):
        mean = _mean_of_sum(view, node, x, y if divisor is None else divisor)
    if mean is None and divisor:
        mean = _root_of_mean(view, node, x, 1 / divisor)
    if is_number(x) and x == 1:
        return Term("reciprocal", (y,), (node,))
    return mean or silu_of_quotient(view, node, x, y) or Term("div", (x, y), (node,))


@spelt(torch.reciprocal, ".reciprocal", ".reciprocal_", aten.reciprocal.default,
       aten.reciprocal_.default)  # fmt: skip
def _reciprocal(view: ViewLike, node: fx.Node) -> Term:
    (x,) = arguments(node, "input|self")
    if not _safe(view, node, x, 1):
        return opaque(node)
    below = view.see(x)
    if below and below.word == "sqrt":
        return Term("rsqrt", below.args, (node, *below.nodes))
    return Term("reciprocal", (x,), (node,))


@spelt(
    operator.pow, torch.pow, ".pow", ".pow_", operator.ipow,
    aten.pow.Tensor_Scalar, aten.pow_.Scalar,
)  # fmt: skip
def _pow(view: ViewLike, node: fx.Node) -> Term:
    x, exponent = arguments(node, "input|self", "exponent")
    words = {2.0: "square", -0.5: "rsqrt", 0.5: "sqrt"}
    if not is_number(exponent) or not isinstance(x, fx.Node) or not _safe(view, node, x, exponent):
        return opaque(node)
    word = words.get(exponent)
    below = view.see(x)
    if below and below.word == "sqrt" and exponent in (2, -1):
        inner = view.see(below.args[0])
        if exponent == -1:
            return Term("rsqrt", below.args, (node, *below.nodes))
        if inner is not None:
            return Term(inner.word, inner.args, (node, *below.nodes, *inner.nodes), inner.flaw)
    return Term(word, (x,), (node,)) if word else Term("power", (x, exponent), (node,))


def _unary(word: str, *spellings: object) -> None:
    @spelt(*spellings)
    def read(view: ViewLike, node: fx.Node) -> Term:
        (x,) = arguments(node, "input|self")
        return Term(word, (x,), (node,)) if _safe(view, node, x, 1) else opaque(node)


_unary("square", torch.square, ".square", ".square_", aten.square.default)
_unary("rsqrt", torch.rsqrt, ".rsqrt", ".rsqrt_", aten.rsqrt.default, aten.rsqrt_.default)


@spelt(torch.sqrt, ".sqrt", ".sqrt_", aten.sqrt.default, aten.sqrt_.default)
def _sqrt(view: ViewLike, node: fx.Node) -> Term:
    (x,) = arguments(node, "input|self")
    if not _safe(view, node, x, 1):
        return opaque(node)
    below = view.see(x)
    if below and below.word == "reciprocal":
        return Term("rsqrt", below.args, (node, *below.nodes))
    return Term("sqrt", (x,), (node,))


_unary("same", aten.alias.default)


@spelt(torch.nn.functional.dropout, torch.dropout, aten.dropout.default)
def _dropout(view: ViewLike, node: fx.Node) -> Term:
    """Outside of training, and of nothing, it is no op."""
    x, p, train = arguments(node, "input|self", "p", "training|train")
    idle = train is False or (is_number(p) and p == 0)
    return Term("same", (x,), (node,)) if idle else opaque(node)


@spelt(torch.clone, ".clone", aten.clone.default)
def _clone(view: ViewLike, node: fx.Node) -> Term:
    (x,) = arguments(node, "input|self")
    return opaque(node) if len(node.args) + len(node.kwargs) > 1 else Term("same", (x,), (node,))


_unary("detach", aten.detach.default)  # before autograd it is not the same


@spelt(aten.expand.default, ".expand", ".expand_as", aten.expand_as.default)
def _expand(view: ViewLike, node: fx.Node) -> Term:
    """One value a row, repeated for each column."""
    x = node.args[0]
    shapes = view.facts.shape(x), view.facts.shape(node)
    if None in shapes or not shapes[1] or not same_shape(shapes[0], (*shapes[1][:-1], 1)):
        return opaque(node)
    return Term("expand", (x,), (node,))


# ---- reductions -------------------------------------------------------------------------------

_DROPPED = "it drops the dimension that it reduces (keepdim=False)"


def _reduction(word: str, *spellings: object) -> None:
    @spelt(*spellings)
    def read(view: ViewLike, node: fx.Node) -> Term:
        names = ("input|self", "dim|axis", "keepdim|keepdims", "dtype")
        x, dim, keepdim, dtype = arguments(node, *names)
        flaw = _not_last(view, x, dim, word)
        if flaw is None and not keepdim:
            flaw = _DROPPED
        if flaw is None and dtype is not None and view.facts.dtype(x) != dtype:
            flaw = f"the {word} casts to {str(dtype).removeprefix('torch.')} while it sums"
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


def _mean_of_sum(view: ViewLike, node: fx.Node, total: object, divisor: object) -> Term | None:
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
    return inner.args[0] if isinstance(inner, Term) else inner


def _root_of_mean(view: ViewLike, node: fx.Node, root: object, factor: float) -> Term | None:
    """sqrt(sum(x)) / sqrt(N) as sqrt(mean(x)), and x / sqrt(sum(x)) * sqrt(N) likewise."""
    term = view.see(root)
    if term is None or term.flaw:
        return None
    if term.word == "sqrt":
        mean = _scaled_sum(view, term, 1 / factor**2)
        return mean and Term("sqrt", (mean,), (node, *term.nodes))
    if term.word == "mul":
        for x, below in (term.args, term.args[::-1]):
            if isinstance(below, Term) and below.word == "rsqrt":
                mean = _scaled_sum(view, below, factor**2)
                inner = mean and Term("rsqrt", (mean,), below.nodes)
                return inner and Term("mul", (x, inner), (node, *term.nodes))
    return None


def _scaled_numerator(view: ViewLike, node: fx.Node, x: object, root: Term) -> Term | None:
    """sqrt(N) * x / sqrt(sum(y)) as x * rsqrt(mean(y))."""
    term = view.see(x)
    if term is None or term.word != "mul":
        return None
    for inner, factor in (term.args, term.args[::-1]):
        number = view.facts.number(factor)
        mean = _scaled_sum(view, root, number**2) if number else None
        if mean:
            nodes = (node, *term.nodes)
            return Term("mul", (inner, Term("rsqrt", (mean,), root.nodes)), nodes)
    return None


def _scaled_sum(view: ViewLike, root: Term, divisor: float) -> Term | None:
    total = view.see(root.args[0])
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
    kept = _kept(view, node, x) if dim == -1 else None
    return kept or reshape(view, node, x)


def _kept(view: ViewLike, node: fx.Node, x: object) -> Term | None:
    """A reduction without keepdim, or a root of one, whose dimension is put back."""
    term = view.see(x)
    if term is None:
        return None
    if term.flaw == _DROPPED:
        return Term(term.word, term.args, (node, *term.nodes))
    if term.flaw is None and term.word in ("rsqrt", "sqrt", "add", "mul", "div"):
        numbers = [view.facts.number(a) is not None for a in term.args]
        if numbers.count(False) == 1:
            at = numbers.index(False)
            inner = _kept(view, node, term.args[at])
            args = (*term.args[:at], inner, *term.args[at + 1 :])
            return inner and Term(term.word, args, term.nodes)
    return None


# ---- casts ------------------------------------------------------------------------------------

_FIXED = {
    ".float": torch.float32, ".half": torch.float16,
    ".bfloat16": torch.bfloat16, ".double": torch.float64,
}  # fmt: skip


@spelt(*_FIXED)
def _fixed_cast(view: ViewLike, node: fx.Node) -> Term:
    if _relaid((*node.args, *node.kwargs.values())):
        return opaque(node)
    return Term("cast", node.args[:1], (node,), dtype=_FIXED["." + node.target])


@spelt(".to", aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout, ".type",
       prims.convert_element_type.default)  # fmt: skip
def _to(view: ViewLike, node: fx.Node) -> Term:
    (x,) = arguments(node, "input|self|a")
    given = [a for a in (*node.args, *node.kwargs.values()) if a is not x]
    dtypes = [a for a in given if isinstance(a, torch.dtype)]
    models = [a for a in given if isinstance(a, fx.Node)]
    moves = any(isinstance(a, (torch.device, str)) for a in given)
    moves = moves or not all(map(_is_dtype_of, models))
    if _relaid(given) or (moves and not view.facts.same_device(node, x)):
        return opaque(node)
    if dtypes:
        return Term("cast", (x,), (node,), dtype=dtypes[0])
    return _like(view, node, x, models[0]) if models else opaque(node)


@spelt(".type_as", aten.type_as.default)
def _type_as(view: ViewLike, node: fx.Node) -> Term:
    x, model = arguments(node, "input|self", "other")
    return _like(view, node, x, model)


def _like(view: ViewLike, node: fx.Node, x: object, model: fx.Node) -> Term:
    """A cast to the dtype of another node, or to a dtype that a node holds (`x.dtype`)."""
    devices = view.facts.device(x), view.facts.device(node)
    if None not in devices and devices[0] != devices[1]:
        return opaque(node)
    known = view.facts.dtype(node)
    if known is not None:
        return Term("cast", (x,), (node,), dtype=known)
    if _is_dtype_of(model):
        model = model.args[0]
    return Term("cast", (x,), (node,), dtype=view.facts.static_dtype(model) or model)


def _is_dtype_of(operand: fx.Node) -> bool:
    return operand.target is getattr and operand.args[1] == "dtype"


def _relaid(given: Iterable[object]) -> bool:
    """True if a cast is told how its result should lie in memory, other than as its operand."""
    kept = (torch.preserve_format, torch.strided)
    return any(isinstance(a, (torch.memory_format, torch.layout)) and a not in kept for a in given)


# ---- whole norms ------------------------------------------------------------------------------


@spelt(torch.rms_norm, torch.nn.functional.rms_norm, aten.rms_norm.default)
def _rms_norm(view: ViewLike, node: fx.Node) -> Term:
    return _whole(view, node, (node,))


@spelt(operator.getitem)
def _getitem(view: ViewLike, node: fx.Node) -> Term:
    source, index = node.args
    if not isinstance(source, fx.Node):
        return opaque(node)
    if source.target is aten._fused_rms_norm.default and index == 0:
        return _whole(view, source, (node, source))
    if isinstance(index, int):
        return Term("item", (source, index), (node,))
    kept = _kept(view, node, source) if index == (..., None) else None
    return kept or opaque(node)


def _whole(view: ViewLike, call: fx.Node, nodes: tuple[fx.Node, ...]) -> Term:
    x, shape, weight, eps = arguments(call, "input|self", "normalized_shape", "weight", "eps")
    return Term("rms_norm", (x, weight, eps), nodes, _not_a_row(shape, view.facts.shape(x)))


def _not_a_row(normalized: object, shape: tuple | None) -> str | None:
    sizes = normalized if isinstance(normalized, (tuple, list)) else (normalized,)
    if any(isinstance(size, fx.Node) for size in sizes):
        return "its normalized_shape is computed by the graph, so it may be any"
    if len(sizes) != 1:
        return f"it normalises over the last {len(sizes)} dimensions together"
    if shape is not None and not (shape and known_equal(sizes[0], shape[-1])):
        return f"its normalized_shape {tuple(sizes)} is not the last dimension of {shape}"
    return None


def read_leaf(view: ViewLike, node: fx.Node) -> Term:
    """A leaf module of a symbolic trace."""
    module = view.graph_module.get_submodule(node.target)
    (x,) = arguments(node, "x|input")
    if len(node.args) + len(node.kwargs) != 1 or x is None:
        return opaque(node)
    if type(module) is torch.nn.RMSNorm:
        flaw = _not_a_row(module.normalized_shape, view.facts.shape(x))
        if _altered(module):
            flaw = f"the module {node.target!r} has hooks or a forward of its own"
        weight = Attr(f"{node.target}.weight") if module.weight is not None else None
        return Term("rms_norm", (x, weight, module.eps), (node,), flaw)
    if isinstance(module, torch.nn.RMSNorm):
        flaw = f"the module {node.target!r} is a {type(module).__name__}, not a plain nn.RMSNorm"
        return Term("rms_norm", (x, None, None), (node,), flaw)
    if type(module) is torch.nn.Identity and not _altered(module):
        return Term("same", (x,), (node,))
    if type(module) in LEAF_ACTIVATIONS and not _altered(module):
        return activation(view, node, LEAF_ACTIVATIONS[type(module)], x)
    return opaque(node)


def _altered(module: torch.nn.Module) -> bool:
    """True if a call of the module does more, or other things, than its class says."""
    everywhere = torch.nn.modules.module
    return "forward" in module.__dict__ or any(
        (
            module._forward_hooks, module._forward_pre_hooks,
            module._backward_hooks, module._backward_pre_hooks,
            everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks,
            everywhere._global_backward_hooks, everywhere._global_backward_pre_hooks,
        )
    )  # fmt: skip
