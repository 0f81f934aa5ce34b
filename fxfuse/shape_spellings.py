"""What gives a tensor another shape and leaves its elements in their order: one word, `view`."""

from __future__ import annotations

import torch
from torch import fx

from fxfuse.term import Term, ViewLike, arguments, opaque, spelt

aten = torch.ops.aten


@spelt(
    ".view", ".reshape", ".flatten", ".unflatten", ".squeeze",
    torch.reshape, torch.flatten, torch.unflatten, torch.squeeze,
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
)  # fmt: skip
def _reshape(view: ViewLike, node: fx.Node) -> Term:
    return reshape(view, node, *arguments(node, "input|self"))


def reshape(view: ViewLike, node: fx.Node, x: object) -> Term:
    """x in another shape, if not also in another dtype, as in `x.view(torch.int8)`."""
    others = (a for a in (*node.args, *node.kwargs.values()) if a is not x)
    dtypes = view.facts.dtype(x), view.facts.dtype(node)
    if any(map(_is_dtype, others)) or (None not in dtypes and dtypes[0] != dtypes[1]):
        return opaque(node)
    return Term("view", (x,), (node,))


def _is_dtype(operand: object) -> bool:
    if isinstance(operand, fx.Node):
        return operand.target is getattr and operand.args[1] == "dtype"
    return isinstance(operand, torch.dtype)
