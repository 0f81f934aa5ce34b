"""How casts are spelt: to a dtype, to that of another tensor, with or without a device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from fxfuse.term import Term, ViewLike, arguments, opaque, spelt

aten = torch.ops.aten
prims = torch.ops.prims

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


def behind_casts(view: ViewLike, operand: object) -> object:
    """An operand without casts, and what else leaves values as they are."""
    term = view.see(operand)
    while term is not None and term.word in ("cast", "same"):
        operand = term.args[0]
        term = view.see(operand)
    return operand
