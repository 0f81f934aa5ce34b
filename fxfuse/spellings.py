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
    plain = alpha is None or (is_number(alpha) and alpha == 1)
    return Term("add", (x, y), (node,)) if plain and _safe(view, node, x, y) else opaque(node)


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
        return Term("mul", (x, Term("rsqrt", below.args, below.nodes)), (node,))
    mean = _mean_of_sum(view, node, x, y) if is_number(y) else None
    if is_number(x) and x == 1:
        return Term("reciprocal", (y,), (node,))
    return mean or silu_of_quotient(view, node, x, y) or Term("div", (x, y), (node,))


@spelt(torch.reciprocal, ".reciprocal", aten.reciprocal.default)
def _reciprocal(view: ViewLike, node: fx.Node) -> Term:
    (x,) = arguments(node, "input|self")
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
    return Term(word, (x,), (node,)) if word else Term("power", (x, exponent), (node,))


def _unary(word: str, *spellings: object) -> None:
    @spelt(*spellings)
    def read(view: ViewLike, node: fx.Node) -> Term:
        return Term(word, tuple(arguments(node, "input|self")), (node,))


_unary("square", torch.square, ".square", aten.square.default)
_unary("rsqrt", torch.rsqrt, ".rsqrt", aten.rsqrt.default)
_unary("sqrt", torch.sqrt, ".sqrt", aten.sqrt.default)
_unary("same", aten.alias.default)
_unary("detach", aten.detach.default)  # before autograd it is not the same


@spelt(aten.expand.default)
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
        x, dim, keepdim, dtype = arguments(node, "input|self", "dim|axis", "keepdim", "dtype")
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


def _mean_of_sum(view: ViewLike, node: fx.Node, total: object, divisor: float) -> Term | None:
    """sum(x) / N as a mean, where N is the width of x."""
    term = view.see(total)
    if term is None or term.word != "sum":
        return None
    shape = view.facts.shape(term.args[0])
    width = shape[-1] if shape else None
    flaw = term.flaw
    if flaw is None and not isinstance(width, int):
        flaw = "the sum of squares is divided by a number that may not be the width (no shapes)"
    if flaw is None and abs(divisor - width) > 1e-9 * width:
        flaw = f"the sum of squares is divided by {divisor:g}, not by the width {width}"
    return Term("mean", term.args, (node, *term.nodes), flaw)


@spelt(torch.unsqueeze, ".unsqueeze", aten.unsqueeze.default)
def _unsqueeze(view: ViewLike, node: fx.Node) -> Term:
    x, dim = arguments(node, "input|self", "dim")
    kept = _kept(view, node, x) if dim == -1 else None
    return kept or reshape(view, node, x)


def _kept(view: ViewLike, node: fx.Node, x: object) -> Term | None:
    """A reduction without keepdim whose dimension is put back."""
    term = view.see(x)
    if term is None or term.flaw != _DROPPED:
        return None
    return Term(term.word, term.args, (node, *term.nodes))


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
