"""What gives a tensor another shape and leaves its elements in their order: one word, `view`."""

from __future__ import annotations

import torch
from torch import fx

from fxfuse.kept_dims import put_back
from fxfuse.term import Term, ViewLike, arguments, opaque, spelt

aten = torch.ops.aten


@spelt(
    ".flatten", ".squeeze", torch.flatten, torch.squeeze, aten.flatten.using_ints,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
)  # fmt: skip
def _merge(view: ViewLike, node: fx.Node) -> Term:
    return reshape(view, node, *arguments(node, "input|self"))


@spelt(
    ".view", ".reshape", torch.reshape,
    aten.view.default, aten._unsafe_view.default, aten.reshape.default,
)  # fmt: skip
def _resize(view: ViewLike, node: fx.Node) -> Term:
    (x,) = arguments(node, "input|self")
    sizes = node.args[1:] or [a for a in node.kwargs.values() if a is not x]
    return put_back(view, node, x) or reshape(view, node, x, _last(sizes))


@spelt(torch.unsqueeze, ".unsqueeze", aten.unsqueeze.default)
def _unsqueeze(view: ViewLike, node: fx.Node) -> Term:
    x, dim = arguments(node, "input|self", "dim")
    return put_back(view, node, x, dim) or reshape(view, node, x)


@spelt(".unflatten", torch.unflatten, aten.unflatten.int)
def _unflatten(view: ViewLike, node: fx.Node) -> Term:
    x, dim, sizes = arguments(node, "input|self", "dim", "sizes")
    shape = view.facts.shape(x)
    is_last = dim == -1 or (shape is not None and dim == len(shape) - 1)
    return reshape(view, node, x, _last(sizes) if is_last else None)


def _last(sizes: object) -> object:
    while isinstance(sizes, (tuple, list)) and sizes:
        sizes = sizes[-1]
    return sizes


def reshape(view: ViewLike, node: fx.Node, x: object, last: object = None) -> Term:
    """x in another shape, if not also in another dtype, as in `x.view(torch.int8)`.

    last: the last of the sizes that it names, or a node that holds all of them.
    """
    others = (a for a in (*node.args, *node.kwargs.values()) if a is not x)
    dtypes = view.facts.dtype(x), view.facts.dtype(node)
    if any(map(_is_dtype, others)) or (None not in dtypes and dtypes[0] != dtypes[1]):
        return opaque(node)
    return Term("spread" if _is_one_row(view, node, x) else "view", (x, last), (node,))


def _is_one_row(view: ViewLike, node: fx.Node, x: object) -> bool:
    """Whether a vector is viewed as the one row of a larger tensor."""
    one, row = view.facts.shape(x), view.facts.shape(node)
    return (
        one is not None
        and row is not None
        and view.facts.dim == -1
        and len(one) == 1 < len(row)
        and row[:-1] == ((1,) * (len(row) - 1))
    )


def _is_dtype(operand: object) -> bool:
    if isinstance(operand, fx.Node):
        return operand.target is getattr and operand.args[1] == "dtype"
    return isinstance(operand, torch.dtype)
