"""How each word of the vocabulary is spelt in PyTorch, in every dialect.

`x / sqrt(v)` is read as `x * rsqrt(v)`, `x * x` and `x ** 2` as `square`, a safe in-place form as
the functional one. Means, casts, gates and views have files of their own.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

import fxfuse.cast_spellings
import fxfuse.shape_spellings  # noqa: F401  (both register readers)
from fxfuse.facts import known_equal, same_shape
from fxfuse.gate_spellings import (
    LEAF_ACTIVATIONS,
    activation,
    is_fresh,
    silu_of_product,
    silu_of_quotient,
)
from fxfuse.kept_dims import kept
from fxfuse.mean_spellings import VAR_MEAN, filling, mean_of_squares, mean_of_sum, moment
from fxfuse.term import Attr, Term, ViewLike, arguments, is_number, opaque, spelt

aten = torch.ops.aten

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
    if not plain and is_number(alpha) and view.facts.constant(x) is not None:
        return Term("add", (x, Term("mul", (y, alpha), (node,))), (node,))
    flaw = None if plain else f"the add multiplies an operand (alpha={alpha})"
    mean = None if flaw else mean_of_squares(view, node, x, y)
    return mean or Term("add", (x, y), (node,), flaw)


@spelt(operator.sub, torch.sub, torch.subtract, ".sub", ".subtract", aten.sub.Tensor)
def _sub(view: ViewLike, node: fx.Node) -> Term:
    x, y, alpha = arguments(node, "input|self", "other", "alpha")
    zeros = filling(view, y)
    if alpha is None and zeros is not None and zeros.args[0] == 0 and _keeps_shape(view, node, x):
        return Term("cast", (x,), (node, *zeros.nodes), dtype=view.facts.dtype(node))
    return Term("sub", (x, y), (node,))


def _keeps_shape(view: ViewLike, node: fx.Node, x: object) -> bool:
    shapes = view.facts.shape(node), view.facts.shape(x)
    return None not in shapes and same_shape(*shapes)


@spelt(torch.zeros_like, aten.zeros_like.default, torch.zeros, aten.zeros.default, ".new_zeros")
def _zeros(view: ViewLike, node: fx.Node) -> Term:
    return _filled(view, node, 0)


@spelt(torch.full_like, aten.full_like.default)
def _full_like(view: ViewLike, node: fx.Node) -> Term:
    return _filled(view, node, arguments(node, "input|self", "fill_value")[1])


def _filled(view: ViewLike, node: fx.Node, value: object) -> Term:
    number = view.facts.constant(value)
    return opaque(node) if number is None else Term("filled", (number,), (node,))


@spelt(torch.hypot, ".hypot", aten.hypot.default)
def _hypot(view: ViewLike, node: fx.Node) -> Term:
    """sqrt(x ** 2 + number ** 2), of a root or a norm x that is not negative."""
    x, y = arguments(node, "input|self", "other")
    for one, other in ((x, y), (y, x)):
        filled = filling(view, other)
        if filled is not None and _keeps_shape(view, node, one):
            nodes = (node, *filled.nodes)
            total = Term("add", (Term("square", (one,), nodes), filled.args[0] ** 2), nodes)
            return Term("sqrt", (total,), nodes)
    return opaque(node)


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
        if is_number(factor) and factor == 1 and _keeps_dtype(view, node, other, factor):
            return Term("same", (other,), (node,))
        if is_number(factor) and factor > 0:
            mean = mean_of_sum(view, node, other, 1 / factor)
            if mean:
                return mean
    return silu_of_product(view, node, x, y) or Term("mul", (x, y), (node,))


def _keeps_dtype(view: ViewLike, node: fx.Node, x: object, factor: float) -> bool:
    """Whether x * factor has x's dtype; integers times a float do not."""
    dtypes = view.facts.dtype(x), view.facts.dtype(node)
    return isinstance(factor, int) if None in dtypes else dtypes[0] == dtypes[1]


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
    inner = view.see(below.args[0]) if below and below.word == "expand" else None
    if inner and inner.word == "sqrt":
        below = Term("sqrt", inner.args, (*below.nodes, *inner.nodes))
    if below and below.word == "sqrt":
        if is_number(x) and x == 1:
            return Term("rsqrt", below.args, (node, *below.nodes))
        return Term("mul", (x, Term("rsqrt", below.args, below.nodes)), (node,))
    divisor = view.facts.constant(y)
    mean = None
    if divisor is not None or not view.facts.is_tensor(y):
        mean = mean_of_sum(view, node, x, y if divisor is None else divisor)
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


_POWERS = {2: "square", -0.5: "rsqrt", 0.5: "sqrt"}


@spelt(
    operator.pow, torch.pow, ".pow", ".pow_", operator.ipow,
    aten.pow.Tensor_Scalar, aten.pow_.Scalar, aten.pow.Tensor_Tensor,
)  # fmt: skip
def _pow(view: ViewLike, node: fx.Node) -> Term:
    x, exponent = arguments(node, "input|self", "exponent")
    word = _POWERS.get(exponent) if is_number(exponent) else None
    if not isinstance(x, fx.Node) or not _safe(view, node, x, exponent):
        return opaque(node)
    if not is_number(exponent):
        return Term("power", (x, exponent), (node,))
    if word == "square":
        return square_of(view, node, x)
    below = view.see(x)
    if below and below.word == "sqrt" and exponent == -1:
        return Term("rsqrt", below.args, (node, *below.nodes))
    return Term(word, (x,), (node,)) if word else Term("power", (x, exponent), (node,))


def square_of(view: ViewLike, node: fx.Node, x: fx.Node) -> Term:
    """x ** 2, or that of the size of a real x, which is the same."""
    below, dtype = view.see(x), view.facts.dtype(x)
    real = below is not None and below.word == "abs" and dtype is not None
    if real and not any(map(_may_be_complex, map(view.facts.dtype, below.args))):
        return Term("square", below.args, (node, *below.nodes))
    return Term("square", (x,), (node,))


def _may_be_complex(dtype: torch.dtype | None) -> bool:
    return dtype is None or dtype.is_complex


def _unary(word: str, *spellings: object) -> None:
    @spelt(*spellings)
    def read(view: ViewLike, node: fx.Node) -> Term:
        (x,) = arguments(node, "input|self")
        if not _safe(view, node, x, 1):
            return opaque(node)
        return square_of(view, node, x) if word == "square" else Term(word, (x,), (node,))


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


_unary("log", torch.log, ".log", aten.log.default)
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


_unary("abs", torch.abs, ".abs", aten.abs.default)
_unary("detach", aten.detach.default, ".detach")  # before autograd it is not the same


@spelt(aten.expand.default, ".expand", ".expand_as", aten.expand_as.default, torch.broadcast_to,
       ".broadcast_to", aten.broadcast_to.default, ".repeat", aten.repeat.default)  # fmt: skip
def _expand(view: ViewLike, node: fx.Node) -> Term:
    """One value a row, repeated for each column, or a vector for each row (`spread`)."""
    x = node.args[0]
    one, whole = view.facts.shape(x), view.facts.shape(node)
    if not one or not whole:
        return opaque(node)
    dim = view.facts.dim
    if dim == -1 and len(one) == 1 and known_equal(one[0], whole[-1]):
        return Term("spread", (x,), (node,))
    column = [1 if at == dim % len(whole) else size for at, size in enumerate(whole)]
    return Term("expand", (x,), (node,)) if same_shape(one, tuple(column)) else opaque(node)


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
    if source.target in VAR_MEAN and index in (0, 1):
        return moment(view, node, source, index)
    if isinstance(index, int):
        return Term("item", (source, index), (node,))
    back = kept(view, node, source) if _puts_back(view, source, index) else None
    return back or opaque(node)


def _puts_back(view: ViewLike, source: fx.Node, index: object) -> bool:
    """Whether an index adds the dimension of norms, as [..., None] and [:, :, None] do."""
    dim, shape = view.facts.dim, view.facts.shape(source)
    if index == (..., None):
        return dim == -1
    if shape is None or not isinstance(index, tuple):
        return False
    all_of_it = [slice(None, None, None)] * len(shape)
    all_of_it.insert(dim % (len(shape) + 1), None)
    return [*index, *all_of_it[len(index) :]] == all_of_it and None in index


def _whole(view: ViewLike, call: fx.Node, nodes: tuple[fx.Node, ...]) -> Term:
    x, shape, weight, eps = arguments(call, "input|self", "normalized_shape", "weight", "eps")
    if view.facts.dim != -1:
        return opaque(nodes[0])
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
    if len(node.args) + len(node.kwargs) != 1 or x is None or view.facts.dim != -1:
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
