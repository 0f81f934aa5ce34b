"""What a node means, however it was spelt.

A `View` reads a torch.fx graph as `Term`s over one small vocabulary: Dynamo's torch functions and
methods, leaf modules of a symbolic trace, ATen from export, make_fx and AOTAutograd all come out
as `add`, `mul`, `square`, `mean`, `rsqrt`, `cast`, `rms_norm`, and the rest as `opaque`.
`x / sqrt(v)` is read as `x * rsqrt(v)`, `sum / N` as `mean`, `x * x` and `x ** 2` as `square`, a
safe in-place form as the functional one. The view never changes a graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from fxfuse.facts import Facts

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True, slots=True)
class Attr:
    """A parameter of a leaf module that no node fetches yet, by its path in the root module."""

    target: str


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One word of the vocabulary.

    word: the meaning, such as "add".
    args: operands: nodes, numbers, None, an `Attr`, or a `Term` that no single node stands for.
    nodes: the graph nodes that this term stands for, outermost first.
    flaw: why a term with the right word is still not what patterns mean by it, or None.
    """

    word: str
    args: tuple = ()
    nodes: tuple[fx.Node, ...] = ()
    flaw: str | None = None
    dtype: object = None


Reader = Callable[["View", fx.Node], Term]
_READERS: dict[object, Reader] = {}


def spelt(*spellings: object) -> Callable[[Reader], Reader]:
    """Register a reader for function targets, ATen overloads, and methods written as ".name"."""

    def register(reader: Reader) -> Reader:
        for spelling in spellings:
            _READERS[spelling] = reader
        return reader

    return register


@dataclass
class View:
    """The terms of one graph, read on demand and remembered."""

    graph_module: fx.GraphModule
    facts: Facts = field(init=False)
    _terms: dict[fx.Node, Term] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.facts = Facts(self.graph_module)

    def term(self, node: fx.Node) -> Term:
        known = self._terms.get(node)
        if known is None:
            known = self._terms[node] = self._read(node)
        return known

    def see(self, operand: object) -> Term | None:
        """The term behind an operand; None for a number, None or an `Attr`."""
        if isinstance(operand, fx.Node):
            return self.term(operand)
        return operand if isinstance(operand, Term) else None

    def _read(self, node: fx.Node) -> Term:
        if node.op == "call_function":
            reader = _READERS.get(node.target)
        elif node.op == "call_method":
            reader = _READERS.get("." + node.target)
        elif node.op == "call_module":
            reader = _leaf
        else:
            reader = None
        return reader(self, node) if reader else opaque(node)


def opaque(node: fx.Node) -> Term:
    return Term("opaque", (), (node,))


def arguments(node: fx.Node, *names: str) -> list:
    """Arguments of a call by name; "a|b" are two names of one; a missing one is None."""
    values = list(node.args[: len(names)])
    for name in names[len(values) :]:
        aliases = name.split("|")
        given = [node.kwargs[a] for a in aliases if a in node.kwargs]
        values.append(given[0] if given else None)
    return values


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ---- arithmetic -------------------------------------------------------------------------------

_IN_PLACE = {
    operator.iadd, operator.imul, operator.itruediv, operator.ipow,
    aten.add_.Tensor, aten.add_.Scalar, aten.mul_.Tensor, aten.mul_.Scalar,
    aten.div_.Tensor, aten.div_.Scalar, aten.pow_.Scalar,
}  # fmt: skip


def _safe(view: View, node: fx.Node) -> bool:
    """A functional op, or one that writes to a fresh tensor which nothing else reads."""
    in_place = node.target in _IN_PLACE if node.op == "call_function" else node.target.endswith("_")
    if not in_place:
        return True
    written = node.args[0]
    return (
        isinstance(written, fx.Node) and len(written.users) == 1 and view.facts.allocates(written)
    )


@spelt(
    operator.add, operator.iadd, torch.add, ".add", ".add_",
    aten.add.Tensor, aten.add.Scalar, aten.add_.Tensor, aten.add_.Scalar,
)  # fmt: skip
def _add(view: View, node: fx.Node) -> Term:
    x, y = arguments(node, "input|self", "other")
    alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    plain = is_number(alpha) and alpha == 1 and "out" not in node.kwargs
    return Term("add", (x, y), (node,)) if plain and _safe(view, node) else opaque(node)


@spelt(
    operator.mul, operator.imul, torch.mul, torch.multiply, ".mul", ".mul_", ".multiply",
    aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor, aten.mul_.Scalar,
)  # fmt: skip
def _mul(view: View, node: fx.Node) -> Term:
    x, y = arguments(node, "input|self", "other")
    if "out" in node.kwargs or not _safe(view, node):
        return opaque(node)
    if x is y and isinstance(x, fx.Node):
        return Term("square", (x,), (node,))
    for other, factor in ((x, y), (y, x)):
        if is_number(factor) and factor == 1 and view.facts.dtype(other) == view.facts.dtype(node):
            return Term("same", (other,), (node,))
        if is_number(factor) and factor != 0:
            mean = _mean_of_sum(view, node, other, 1 / factor)
            if mean:
                return mean
    return Term("mul", (x, y), (node,))


@spelt(
    operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide,
    ".div", ".div_", ".divide", ".true_divide",
    aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor, aten.div_.Scalar,
)  # fmt: skip
def _div(view: View, node: fx.Node) -> Term:
    x, y = arguments(node, "input|self", "other")
    if node.kwargs.get("rounding_mode") or "out" in node.kwargs or not _safe(view, node):
        return opaque(node)
    below = view.see(y)
    if below and below.word == "sqrt":
        if is_number(x) and x == 1:
            return Term("rsqrt", below.args, (node, *below.nodes))
        return Term("mul", (x, Term("rsqrt", below.args, below.nodes)), (node,))
    if is_number(y):
        return _mean_of_sum(view, node, x, y) or Term("div", (x, y), (node,))
    if is_number(x) and x == 1:
        return Term("reciprocal", (y,), (node,))
    return Term("div", (x, y), (node,))


@spelt(torch.reciprocal, ".reciprocal", aten.reciprocal.default)
def _reciprocal(view: View, node: fx.Node) -> Term:
    below = view.see(node.args[0]) if node.args else None
    if below and below.word == "sqrt":
        return Term("rsqrt", below.args, (node, *below.nodes))
    return Term("reciprocal", node.args[:1], (node,))


@spelt(
    operator.pow, torch.pow, ".pow", ".pow_", operator.ipow,
    aten.pow.Tensor_Scalar, aten.pow_.Scalar,
)  # fmt: skip
def _pow(view: View, node: fx.Node) -> Term:
    x, exponent = arguments(node, "input|self", "exponent")
    word = {2.0: "square", -0.5: "rsqrt", 0.5: "sqrt"}.get(
        exponent if is_number(exponent) else None
    )
    if word is None or not isinstance(x, fx.Node) or not _safe(view, node):
        return opaque(node)
    return Term(word, (x,), (node,))


def _unary(word: str, *spellings: object) -> None:
    @spelt(*spellings)
    def read(view: View, node: fx.Node) -> Term:
        plain = "out" not in node.kwargs
        return Term(word, tuple(arguments(node, "input|self")), (node,)) if plain else opaque(node)


_unary("square", torch.square, ".square", aten.square.default)
_unary("rsqrt", torch.rsqrt, ".rsqrt", aten.rsqrt.default)
_unary("sqrt", torch.sqrt, ".sqrt", aten.sqrt.default)
_unary("same", aten.alias.default)


# ---- reductions -------------------------------------------------------------------------------


def _reduction(view: View, node: fx.Node, word: str) -> Term:
    x, dim, keepdim, dtype = arguments(node, "input|self", "dim|axis", "keepdim", "dtype")
    flaw = _not_last(view, x, dim, word)
    if flaw is None and not keepdim:
        flaw = f"the {word} drops the dimension that it reduces (keepdim=False)"
    if flaw is None and dtype is not None and view.facts.dtype(x) != dtype:
        flaw = f"the {word} casts to {str(dtype).removeprefix('torch.')} while it sums"
    return Term(word, (x,), (node,), flaw)


def _not_last(view: View, x: object, dim: object, word: str) -> str | None:
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


@spelt(torch.mean, ".mean", aten.mean.dim, aten.mean.default)
def _mean(view: View, node: fx.Node) -> Term:
    return _reduction(view, node, "mean")


@spelt(torch.sum, ".sum", aten.sum.dim_IntList, aten.sum.default)
def _sum(view: View, node: fx.Node) -> Term:
    return _reduction(view, node, "sum")


def _mean_of_sum(view: View, node: fx.Node, total: object, divisor: float) -> Term | None:
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


# ---- casts ------------------------------------------------------------------------------------

_FIXED = {
    ".float": torch.float32, ".half": torch.float16,
    ".bfloat16": torch.bfloat16, ".double": torch.float64,
}  # fmt: skip


@spelt(*_FIXED)
def _fixed_cast(view: View, node: fx.Node) -> Term:
    return Term("cast", node.args[:1], (node,), dtype=_FIXED["." + node.target])


@spelt(".to", aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout, ".type",
       prims.convert_element_type.default)  # fmt: skip
def _to(view: View, node: fx.Node) -> Term:
    x, *rest = node.args
    targets = [a for a in (*rest, *node.kwargs.values()) if isinstance(a, torch.dtype)]
    likes = [a for a in rest if isinstance(a, fx.Node)]
    devices = [a for a in (*rest, node.kwargs.get("device")) if isinstance(a, (torch.device, str))]
    if devices and not view.facts.same_device(node, x):
        return opaque(node)
    if targets:
        return Term("cast", (x,), (node,), dtype=targets[0])
    if likes:
        return _like(view, node, x, likes[0])
    return opaque(node)


@spelt(".type_as", aten.type_as.default)
def _type_as(view: View, node: fx.Node) -> Term:
    return _like(view, node, node.args[0], node.args[1])


def _like(view: View, node: fx.Node, x: object, model: fx.Node) -> Term:
    """A cast to the dtype of another node, or to a dtype that a node holds (`x.dtype`)."""
    known = view.facts.dtype(node)
    if known is not None:
        return Term("cast", (x,), (node,), dtype=known)
    if model.op == "call_function" and model.target is getattr and model.args[1] == "dtype":
        model = model.args[0]
    elif node.op == "call_method" and node.target == "to":
        return opaque(node)  # without facts, `.to(y)` may move to another device as well
    return Term("cast", (x,), (node,), dtype=view.facts.static_dtype(model) or model)


# ---- whole norms ------------------------------------------------------------------------------


@spelt(torch.rms_norm, torch.nn.functional.rms_norm, aten.rms_norm.default)
def _rms_norm(view: View, node: fx.Node) -> Term:
    x, shape, weight, eps = arguments(node, "input|self", "normalized_shape", "weight", "eps")
    return Term("rms_norm", (x, weight, eps), (node,), _not_a_row(shape))


@spelt(operator.getitem)
def _first_of_fused(view: View, node: fx.Node) -> Term:
    source, index = node.args
    fused = isinstance(source, fx.Node) and source.target is aten._fused_rms_norm.default
    if not fused or index != 0:
        return opaque(node)
    x, shape, weight, eps = arguments(source, "input", "normalized_shape", "weight", "eps")
    return Term("rms_norm", (x, weight, eps), (node, source), _not_a_row(shape))


def _not_a_row(shape: object) -> str | None:
    rank = len(shape) if isinstance(shape, (tuple, list)) else 1
    return None if rank == 1 else f"it normalises over the last {rank} dimensions together"


def _leaf(view: View, node: fx.Node) -> Term:
    module = view.graph_module.get_submodule(node.target)
    if type(module) is torch.nn.RMSNorm and len(node.args) == 1 and not node.kwargs:
        flaw = _not_a_row(module.normalized_shape)
        if _hooked(module):
            flaw = f"the module {node.target!r} has hooks, which a fused op would not call"
        weight = Attr(f"{node.target}.weight") if module.weight is not None else None
        return Term("rms_norm", (node.args[0], weight, module.eps), (node,), flaw)
    if type(module) is torch.nn.Identity and len(node.args) == 1:
        return Term("same", node.args, (node,))
    return opaque(node)


def _hooked(module: torch.nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks
        or module._backward_hooks or module._backward_pre_hooks
    )  # fmt: skip
